"""300 hostile requests beside a well-behaved stream; the whole campaign is in benchmarks."""

from __future__ import annotations

import asyncio
import random
import threading

from fake_server import call, chat_body, events, eventually, fake_server
from hostile_client import send
from hostile_requests import FAMILIES, attacks

CHAT = "/v1/chat/completions"


def test_hostile_requests_harm_nobody() -> None:
    wanted = attacks(7, 300)
    every = {family(random.Random(0)).family for family in FAMILIES}
    assert {make().family for make in wanted} == every
    with fake_server(engine=["--step-ms", "10"]) as running:
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
        assert running.process.poll() is None
