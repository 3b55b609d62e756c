"""Deny by default: every route has a level, and the key is asked for everywhere else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import Running, call, fake_server, is_anthropic_error, is_error_body

from metainfer.engine.protocol import EngineStats
from metainfer.server.access import LEVELS, Gate, Level
from metainfer.server.app import create_app, new_state
from metainfer.server.live_page import FILES
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
    assert public == {"/health", "/health/live", "/health/ready", "/ready", *FILES}


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    keys = ["--key", "sésame-1", "--key", "second", "--admin-key", "chief"]
    with fake_server(keys) as running:
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
            assert bare.status == 401, where
            assert bare.json["error"]["type"] == "authentication_error"
            if path.startswith("/v1/messages"):
                assert is_anthropic_error(bare.json)
            else:
                assert is_error_body(bare.json)
                assert bare.json["error"]["code"] == "invalid_api_key"
            for header in ("Bearer wrong", "Bearer", f"Basic {key}", f"Bearer {key}x", key, ""):
                assert call(
                    locked.port, method, where, body, {"Authorization": header}
                ).status == 401  # fmt: skip
            for header in (f"Bearer {key}", f"bearer  {key}", "Bearer second", "Bearer chief"):
                good = call(locked.port, method, where, body, {"Authorization": header})
                shut = LEVELS[path] is Level.ADMIN and header != "Bearer chief"
                assert (good.status == 403) == shut and good.status != 401, (where, header)


def asked(config: ServerConfig, path: str, key: str = "") -> int:
    """The status of `path` behind a gate whose application answers 200 to everything."""
    statuses: list[int] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(Gate(inner, config)(scope, None, send))  # type: ignore[arg-type]
    return statuses[0]


def test_an_admin_path_needs_the_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEVELS, "/v1/things/{name}/stop", Level.ADMIN)
    monkeypatch.setitem(LEVELS, "/v1/things/{name:path}", Level.USER)
    path = "/v1/things/a b/stop"
    for keys, key, status in (
        ((), "", 403),  # no admin key configured: shut, also where everything else is open
        (("u",), "u", 403),
        (("u",), "", 403),
        ((), "u", 403),
    ):
        assert asked(ServerConfig(("m",), api_keys=keys), path, key) == status
    config = ServerConfig(("m",), api_keys=("u", "v"), admin_keys=("a", "b"))
    got = {key: asked(config, path, key) for key in ("", "x", "u", "v", "a", "b")}
    assert got == {"": 401, "x": 401, "u": 403, "v": 403, "a": 200, "b": 200}
    for other in ("/v1/things/a/b", "/v1/models", "/no/such"):
        got = {key: asked(config, other, key) for key in ("", "x", "u", "v", "a")}
        assert got == {"": 401, "x": 401, "u": 200, "v": 200, "a": 200}, other
    open_ = ServerConfig(("m",), admin_keys=("a",))
    assert asked(open_, "/v1/models") == 200 and asked(open_, path) == 401
    assert asked(open_, "/v1/things/x\n/stop") == 401  # what the router matches, the gate does


@pytest.mark.parametrize(
    "path",
    ["/nope", "/page", "/page/", "/page/index.html", "/page/../metrics", "/page/no.js",
     "/docs", "/redoc", "/v1", "//health", "/health/", "/health/../metrics",
     "/Health", "/metrics/", "/health%2Flive/x", "/invocations"],
)  # fmt: skip
def test_paths_that_do_not_exist_need_the_key_too(locked: Running, path: str) -> None:
    assert call(locked.port, "GET", path).status == 401


def test_no_docs_page_that_loads_from_elsewhere(server: Running) -> None:
    assert call(server.port, "GET", "/docs").status == 404
    assert call(server.port, "GET", "/redoc").status == 404
    assert call(server.port, "GET", "/openapi.json").status == 200


def test_anthropics_clients_present_their_key_in_a_header_of_its_own(locked: Running) -> None:
    key = {"x-api-key": "sésame-1".encode().decode("latin-1")}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert call(locked.port, "POST", path, b"{}", key).status == 400
        assert call(locked.port, "POST", path, b"{}", {"x-api-key": "wrong"}).status == 401
    both = key | {"authorization": "Bearer wrong"}
    assert call(locked.port, "POST", "/v1/messages", b"{}", both).status == 401
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messagesx"):
        assert call(locked.port, "POST", path, b"{}", key).status == 401
