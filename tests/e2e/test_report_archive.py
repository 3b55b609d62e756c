"""`metainfer report`: what it packs, and that no prompt, answer, client's id or key is in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from faulty_server import MODEL, Faulty, faulty, own_cache
from served import eventually

from metainfer.core.errors import UserError
from metainfer.doctor.archive import fetch, pack, scrubber

PROMPT = "xyzzy-the-secret-prompt"
IDENTITY = "plugh-the-secret-id"
KEY = "sk-user-key-4711-abcdef"
ADMIN = "sk-admin-key-0815-abcdef"
SECRETS = (PROMPT, IDENTITY, KEY, ADMIN)


def report(out: Path, cache: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "metainfer.cli.main", "report", str(out), *flags, "--json"]
    environ = os.environ | {
        "METAINFER_CACHE": str(cache),
        "METAINFER_ADMIN_KEY": ADMIN,
        "METAINFER_API_KEY": KEY,
    }
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)


def everything(archive: Path) -> dict[str, str]:
    with zipfile.ZipFile(archive) as packed:
        return {name: packed.read(name).decode() for name in packed.namelist()}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Faulty, Path]]:
    """A server after answers, bad requests, NaN and the death of its engine; its cache folder."""
    folder = tmp_path_factory.mktemp("report")
    cache = own_cache(folder)
    environ = {"METAINFER_API_KEY": KEY, "METAINFER_CACHE": str(cache)}
    with faulty(folder, "--admin-key", ADMIN, environ=environ) as server:
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": IDENTITY}
        ask: Any = {"headers": headers, "timeout": 120}
        url = f"{server.base}/v1/completions"
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "user": IDENTITY}
        body |= {"stop": [PROMPT]}
        assert httpx.post(url, json=body, **ask).status_code == 200
        assert httpx.post(url, json=body | {PROMPT: 1}, **ask).status_code == 400
        assert httpx.post(url, content=PROMPT.encode(), **ask).status_code == 415
        wrong = httpx.get(f"{server.base}/{PROMPT}", **ask)
        assert wrong.status_code == 404
        server.order("nan")
        assert httpx.post(url, json=body, **ask).status_code == 500
        server.order("raise")
        assert httpx.post(url, json=body, **ask).status_code == 503
        assert eventually(lambda: server.status() == "restarting" or server.restarted())
        server.wait_ready()
        assert httpx.post(url, json=body, **ask).status_code == 200
        yield server, cache


def test_a_live_server_is_packed_without_secrets(
    broken: tuple[Faulty, Path], tmp_path: Path
) -> None:
    server, cache = broken
    out = tmp_path / "live.zip"
    done = report(out, cache, "--url", server.base)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"] == "server"
    found = everything(out)
    for secret in SECRETS:
        assert not [name for name, text in found.items() if secret in text], secret
    assert {"machine.json", "software.json", "plan.json", "flight.json", "log.json"} <= set(found)
    assert {"start.json", "metrics.txt", "contents.json", "server.json"} <= set(found)
    assert any(name.startswith("records/qualification/") for name in found)
    flight = json.loads(found["flight.json"])
    assert flight["steps"] and flight["steps"][-1]["outcome"]["drawn"] == 1
    told = json.loads(found["server.json"])
    assert told["status"]["restarts"] == 1 and told["settings"]["api_keys"] == 1
    lines = [line["message"] for line in json.loads(found["log.json"])]
    assert any("NaN or infinity in request" in line for line in lines)
    assert any("the engine ended (ValueError" in line for line in lines)
    assert json.loads(found["plan.json"])["plan"]["model"]["reference"] == MODEL


def test_without_a_server_the_last_dump_is_packed(
    broken: tuple[Faulty, Path], tmp_path: Path
) -> None:
    _, cache = broken
    out = tmp_path / "later.zip"
    done = report(out, cache)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"] == "dump"
    found = everything(out)
    for secret in SECRETS:
        assert not [name for name, text in found.items() if secret in text], secret
    assert json.loads(found["server.json"])["reason"] == "engine_dead"
    assert json.loads(found["flight.json"])["steps"][-1]["outcome"]["error"] == "ValueError"
    assert json.loads(found["start.json"])


def test_the_report_route_needs_the_admin_key(broken: tuple[Faulty, Path], tmp_path: Path) -> None:
    server, cache = broken
    url = f"{server.base}/debug/report"
    assert httpx.get(url, timeout=120).status_code == 401
    assert (
        httpx.get(url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120).status_code == 403
    )
    done = report(tmp_path / "no.zip", cache, "--url", server.base, "--admin-key", "wrong-key")
    assert done.returncode == 1 and "refuses the report" in done.stderr
    with pytest.raises(UserError, match=r"gives no report.*--url"):
        fetch("http://127.0.0.1:9", ADMIN)
    with pytest.raises(UserError, match="cannot be written"):
        pack(tmp_path / "nowhere" / "no.zip", None, None)


def test_what_is_scrubbed() -> None:
    home = str(Path.home())
    scrub = scrubber("sk-secret-key", {"METAINFER_API_KEY": "sk-other-key"})
    text = scrub(f"{home}/model sk-secret-key and sk-other-key {home}")
    assert text == "~/model <key> and <key> ~"
    assert scrubber("abc", {})("abc") == "abc"
