"""The live page without a browser: served whole, asks nobody else, its scripts parse, its JSON.

What a browser sees is ``tests/browser/live_page.mjs`` (``make browser``).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec
import pytest
from fake_server import Running, call, chat_body, eventually, fake_server
from test_metrics_facts import INFO

import metainfer.server
from metainfer.engine.protocol import EngineStats, Progress
from metainfer.server.app import new_state
from metainfer.server.live_page import FILES
from metainfer.server.state import ServerConfig, ServerState
from metainfer.server.status import PageStatus, page_status

PAGE = Path(metainfer.server.__file__).parent / "page"
SCRIPTS = sorted(PAGE.glob("*.js"))


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def read() -> Reader:
    reader = Reader()
    reader.feed((PAGE / "index.html").read_text())
    return reader


# the files


def test_every_file_is_served_under_the_policy(server: Running) -> None:
    assert {path.name for path in PAGE.iterdir()} == {
        name.rpartition("/")[2] for package, name, _ in FILES.values() if "server" in package
    }
    for path, (_, _, media) in FILES.items():
        answer = call(server.port, "GET", path)
        assert answer.status == 200 and answer.raw
        assert answer.headers["content-type"].startswith(media)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy and "http" not in policy and "*" not in policy
        for kind in ("object-src", "base-uri", "form-action", "frame-ancestors"):
            assert f"{kind} 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_nobody_else_is_asked_and_nothing_is_inline() -> None:
    reader = read()
    assert not any(tag == "style" for tag, _ in reader.tags)
    for tag, attributes in reader.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        if tag == "script":
            assert set(attributes) == {"type", "src"}
        for name in ("src", "href"):
            link = attributes.get(name)
            assert link is None or link.startswith("#") or f"/{link}" in FILES, link
    for path in (*PAGE.glob("*.css"), *SCRIPTS):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text), path.name
    for path in SCRIPTS:  # relative, so that the page works below a proxy's prefix
        for name in re.findall(r'from "([^"]+)"', path.read_text()):
            assert (PAGE / name).exists(), (path.name, name)


def test_text_becomes_text_only() -> None:
    for path in SCRIPTS:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|DOMParser"
            r"|localStorage|document\.cookie|\.style\b",
            path.read_text(),
        ), path.name


def test_ids_that_scripts_want_exist_once() -> None:
    reader = read()
    ids = [attributes["id"] for _, attributes in reader.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    wanted = {
        name
        for path in SCRIPTS
        for name in re.findall(r'(?:byId|put|say)\(\s*"([\w-]+)"', path.read_text())
    }
    assert len(wanted) > 20 and wanted <= set(ids)
    for tag, attributes in reader.tags:
        assert (attributes.get("aria-labelledby") or ids[0]) in ids, tag
        assert (attributes.get("for") or ids[0]) in ids
    labelled = {attributes.get("for") for tag, attributes in reader.tags if tag == "label"}
    for tag, attributes in reader.tags:
        assert tag not in ("input", "textarea") or attributes["id"] in labelled
    tags = dict(reader.tags)
    assert tags["html"]["lang"] == "en" and "noscript" in tags


NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


@needs_node
def test_scripts_parse(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"type": "module"}')
    for path in SCRIPTS:
        shutil.copy(path, tmp_path)
    for path in SCRIPTS:
        subprocess.run([str(NODE), "--check", path.name], cwd=tmp_path, check=True)


@needs_node
def test_events_are_the_same_however_they_are_cut(tmp_path: Path) -> None:
    stream = ': keep-alive\n\ndata: {"a": "é\\n"}\n\ndata:{"b": 1}\r\n\r\ndata: [DONE]\n\n'
    program = f"""
    import {{ EventReader }} from "./events.js";
    const stream = {json.dumps(stream)};
    const found = new Set();
    for (let a = 0; a <= stream.length; a += 1) for (let b = a; b <= stream.length; b += 1) {{
      const reader = new EventReader();
      const cuts = [stream.slice(0, a), stream.slice(a, b), stream.slice(b)];
      found.add(JSON.stringify(cuts.flatMap((piece) => reader.push(piece))));
    }}
    console.log(JSON.stringify([...found]));
    """
    (tmp_path / "package.json").write_text('{"type": "module"}')
    shutil.copy(PAGE / "events.js", tmp_path)
    (tmp_path / "main.js").write_text(program)
    done = subprocess.run([str(NODE), "main.js"], cwd=tmp_path, check=True, capture_output=True)
    (only,) = json.loads(done.stdout)
    assert json.loads(only) == ['{"a": "é\\n"}', '{"b": 1}', "[DONE]"]


# the JSON


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with fake_server(["--key", "k"]) as running:
        yield running


def test_the_page_is_public_and_what_it_shows_is_not(locked: Running) -> None:
    for path in FILES:
        assert call(locked.port, "GET", path).status == 200
        assert b'"k"' not in call(locked.port, "GET", path).raw
    assert call(locked.port, "GET", "/page/status").status == 401
    key = {"Authorization": "Bearer k"}
    assert call(locked.port, "GET", "/page/status", headers=key).status == 200


def test_status_is_what_its_schema_says(server: Running) -> None:
    document = call(server.port, "GET", "/openapi.json").json
    assert "/" not in document["paths"]
    declared = document["paths"]["/page/status"]["get"]["responses"]["200"]["content"]
    schema = declared["application/json"]["schema"]
    answer = call(server.port, "GET", "/page/status")
    assert answer.headers["cache-control"] == "no-store"
    jsonschema.validate(answer.json, {**schema, "components": document["components"]})
    msgspec.json.decode(answer.raw, type=PageStatus)


def test_status_counts_and_remembers() -> None:
    with fake_server() as running:
        for _ in range(3):
            call(running.port, "POST", "/v1/chat/completions", chat_body("say:abcde"))

        def sampled() -> bool:
            return bool(call(running.port, "GET", "/page/status").json["history"])

        assert eventually(sampled, 60)
        now = call(running.port, "GET", "/page/status").json
        assert now["status"] == "ready" and now["alarms"] == []
        assert now["latency"]["first_token"]["count"] == now["latency"]["queue"]["count"] == 3
        assert now["latency"]["inter_token"]["count"] == 3 * 4
        assert 0 < now["latency"]["first_token"]["p50_s"] < now["latency"]["window_s"]
        assert now["requests"] == {"finished": 3, "cancelled": 0}
        assert now["start_phases"] == [{"name": "weights", "seconds": 0.25}]
        assert now["ops"] == {"native": 1, "compatible": 0, "reference": 0}
        last = now["history"][-1]["t"]
        later = call(running.port, "GET", f"/page/status?since={last}").json["history"]
        assert all(sample["t"] > last for sample in later)


@pytest.mark.parametrize("since", ["x", "", "1e", "[]"])
def test_a_bad_since_is_a_400(server: Running, since: str) -> None:
    assert call(server.port, "GET", f"/page/status?since={since}").status == 400


@pytest.mark.parametrize("since", ["nan", "inf", "-inf", "-1", "1e308"])
def test_an_odd_since_is_no_fault(server: Running, since: str) -> None:
    assert call(server.port, "GET", f"/page/status?since={since}").status == 200


def state_of(stats: EngineStats, alive: bool = True) -> ServerState:
    client = SimpleNamespace(stats=stats, alive=alive)
    return new_state(ServerConfig(("m",)), client)  # type: ignore[arg-type]


def ready(state: ServerState, **changes: Any) -> ServerState:
    info = msgspec.structs.replace(INFO, **changes)
    state.engine_ready(info, SimpleNamespace())  # type: ignore[arg-type]
    return state


def codes(state: ServerState) -> list[str]:
    return [alarm.code for alarm in page_status(state).alarms]


def test_before_the_engine_is_ready_nothing_is_claimed() -> None:
    now = page_status(state_of(EngineStats()))
    assert (now.status, now.links, now.ops, now.memory, now.alarms) == (
        "starting",
        None,
        None,
        [],
        [],
    )
    assert (now.max_context, now.drafts.method, now.cache.hit_rate) == (None, None, None)
    assert now.latency.first_token.p50_s is None


def test_b05_b24_b25_alarms_are_said_once_each_worst_first() -> None:
    stats = EngineStats(
        draft_alarm="none of 512", cache_alarms=("0 of 64 hit",), non_finite=1, abandoned_steps=2
    )
    assert codes(ready(state_of(stats))) == [
        "drafts", "prefix_cache", "non_finite", "memory_short", "reference_ops", "link_width",
    ]  # fmt: skip
    dead = ready(state_of(EngineStats(), alive=False), links=(), plan={})
    assert codes(dead) == ["engine_dead"]
    draining = ready(state_of(EngineStats()), links=(), plan={})
    draining.draining = True
    assert codes(draining) == ["draining"]
    back = ready(state_of(EngineStats()), links=(), plan={})
    back.restarts.ready(2.0)
    assert codes(back) == ["restarted"]
    back.restarting = "killed"
    assert codes(back) == ["restarting", "restarted"]


def test_memory_beyond_the_ledger_is_an_alarm() -> None:
    plan = {"ledger": INFO.plan["ledger"]}
    for held, alarm in ((700, []), (707, []), (708, ["memory"])):
        state = ready(state_of(EngineStats()), links=(), plan=plan, held_bytes={"kv": held})
        assert codes(state) == alarm


def test_unknown_stays_unknown() -> None:
    now = page_status(ready(state_of(EngineStats())))
    pools = {pool.pool: (pool.planned_bytes, pool.held_bytes) for pool in now.memory}
    assert pools == {"weights": (150, 150), "kv": (700, 704), "transient": (30, None)}
    assert now.links is not None
    first, second = now.links
    assert (first.source, first.target, first.width, first.generation) == ("host", "0", 8, None)
    assert (second.peer_read, second.peer_write, second.bytes_s) == (True, False, None)


def test_a_start_that_takes_long_is_not_silent() -> None:
    with fake_server(engine=["--hang-at-start"], ready=False) as running:
        where = (running.port, "GET", "/page/status")
        assert eventually(lambda: call(*where).json["phase"] == "weights", 60)
        now = call(*where).json
        assert (now["status"], now["start_phases"]) == ("starting", [])
    client = SimpleNamespace(
        stats=EngineStats(), alive=True, phase="warm-up", progress=[Progress("weights", 0.5)]
    )
    state = new_state(ServerConfig(("m",)), client)  # type: ignore[arg-type]
    told = page_status(state)
    assert told.phase == "warm-up"
    assert [(each.name, each.seconds) for each in told.start_phases] == [("weights", 0.5)]
