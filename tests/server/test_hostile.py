"""300 hostile requests beside a well-behaved stream; the whole campaign is in benchmarks."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path

from fake_server import call, chat_body, events, eventually, fake_server
from hostile_client import send
from hostile_requests import FAMILIES, attacks

CHAT = "/v1/chat/completions"


MOST_MS = 100.0  # of the loop's processor time in one turn: what others wait


def test_hostile_requests_harm_nobody(tmp_path: Path) -> None:
    wanted = attacks(7, 300)
    every = {family(random.Random(0)).family for family in FAMILIES}
    assert {make().family for make in wanted} == every
    turns = tmp_path / "turns.json"
    server, engine = ["--turns", str(turns)], ["--step-ms", "10"]
    with fake_server(server, engine, program="serve_turns.py") as running:
        alone = call(running.port, "POST", CHAT, chat_body("mind your own", max_tokens=500))
        beside: list[object] = []

        def stream() -> None:
            body = chat_body("mind your own", max_tokens=500, stream=True)
            beside.extend(events(call(running.port, "POST", CHAT, body).raw))

        reader = threading.Thread(target=stream)
        reader.start()
        outcome = asyncio.run(send(running.port, wanted))
        reader.join()
        assert outcome.faults == []
        deltas = [e["choices"][0]["delta"].get("content") or "" for e in beside[:-1]]  # type: ignore[index]
        assert "".join(deltas) == alone.json["choices"][0]["message"]["content"]
        assert beside[-1] == "[DONE]"
        assert eventually(lambda: call(running.port, "GET", "/health").json["pending"] == 0)
        assert running.stop() == 0
    seen = json.loads(turns.read_text())
    assert seen["turns"] > 1000 and seen["longest_ms"][0] < MOST_MS, seen
