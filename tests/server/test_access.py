"""Deny by default: every route has a level, and the key is asked for everywhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from fake_server import Running, call, fake_server, is_error_body

from metainfer.engine.protocol import EngineStats
from metainfer.server.access import LEVELS, Level
from metainfer.server.app import create_app, new_state
from metainfer.server.state import ServerConfig


def routes() -> dict[str, set[str]]:
    client = SimpleNamespace(stats=EngineStats(), alive=True)
    app = create_app(new_state(ServerConfig(("m",)), client)).app  # type: ignore[arg-type]
    found: dict[str, set[str]] = {}
    for route in app.routes:
        found.setdefault(route.path, set()).update(route.methods)
    return found


def test_every_route_declares_a_level_and_every_level_a_route() -> None:
    assert set(routes()) == set(LEVELS)
    public = {path for path, level in LEVELS.items() if level is Level.PUBLIC}
    assert public == {"/health", "/health/live", "/health/ready", "/ready"}


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with fake_server(["--key", "sésame-1"]) as running:
        yield running


def test_walk_without_with_wrong_and_with_key(locked: Running) -> None:
    key = "sésame-1".encode().decode("latin-1")
    for path, methods in routes().items():
        where = re.sub(r"\{.*\}", "fake", path)
        for method in methods - {"HEAD"}:
            body = b"{}" if method == "POST" else None
            bare = call(locked.port, method, where, body)
            if LEVELS[path] is Level.PUBLIC:
                assert bare.status == 200
                continue
            assert (bare.status, bare.json["error"]["code"]) == (401, "invalid_api_key"), where
            assert bare.json["error"]["type"] == "authentication_error"
            assert is_error_body(bare.json)
            for header in ("Bearer wrong", "Bearer", f"Basic {key}", f"Bearer {key}x", key, ""):
                assert call(
                    locked.port, method, where, body, {"Authorization": header}
                ).status == 401  # fmt: skip
            for header in (f"Bearer {key}", f"bearer  {key}"):
                good = call(locked.port, method, where, body, {"Authorization": header})
                assert good.status != 401, where


@pytest.mark.parametrize(
    "path",
    ["/nope", "/", "/docs", "/redoc", "/v1", "//health", "/health/", "/health/../metrics",
     "/Health", "/metrics/", "/health%2Flive/x", "/invocations"],
)  # fmt: skip
def test_paths_that_do_not_exist_need_the_key_too(locked: Running, path: str) -> None:
    assert call(locked.port, "GET", path).status == 401


def test_no_docs_page_that_loads_from_elsewhere(server: Running) -> None:
    assert call(server.port, "GET", "/docs").status == 404
    assert call(server.port, "GET", "/redoc").status == 404
    assert call(server.port, "GET", "/openapi.json").status == 200
