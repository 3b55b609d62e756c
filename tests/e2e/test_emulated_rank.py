"""One rank of several on this CPU: real shapes and shards, waits, and answers that are marked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from metainfer.bench import emulated
from metainfer.bench.offline import OfflineOptions
from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.request import Request, SamplingParams
from metainfer.engine.engine import Engine
from metainfer.server.access import Gate
from metainfer.server.app import new_state
from metainfer.server.health import Health
from metainfer.server.state import ServerConfig
from metainfer.server.status import alarms
from metainfer.verifier.run import verify

V4, LLAMA, NAMED = "random:tiny-deepseek-v4", "random:tiny-llama", "8x-rtx-pro-6000d"
PROMPT = tuple(range(5, 25))


def rank_of(model: str, layout: str, ranks: int, **wish: Any) -> Engine:
    engine = Engine(
        Intent(
            model=model, platform="cpu", parallel=layout, rank_of=ranks, of_machine=NAMED,
            context=128, concurrency=4, **wish,
        )
    )  # fmt: skip
    engine.start()
    return engine


def answer(engine: Engine, tokens: int = 5) -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    engine.submit(Request("a", PROMPT, params))
    found: list[int] = []
    while engine.has_work:
        outputs, _ = engine.step()
        for output in outputs:
            found += output.tokens
    return tuple(found)


def test_a_rank_holds_its_part_and_waits_in_every_collective() -> None:
    engine = rank_of(V4, "tp2ep4", 4, chunk_tokens=32)
    try:
        assert engine.resolved is not None and engine.resolved.plan.kv_domains == 1
        rows = engine.resolved.plan.ledger
        held = sum(row.bytes for row in rows if row.kind == "weights")
        shared = {row.share for row in rows if row.kind == "weights"}
        assert engine.held_bytes["weights"] == held and any("/4" in share for share in shared)
        before, steps = engine.waited, engine.stats().steps
        assert before is not None
        assert len(answer(engine, 2)) == 2
        stats = engine.stats()
        calls = stats.emulated_calls - before.calls
        # Of each step: words, logits, and per layer attention, shared experts, and two at experts.
        layers = engine.resolved.arch.layers
        assert calls == (stats.steps - steps) * (2 + 4 * layers)
        assert stats.emulated_wait_s * 1e6 > before.us
        assert sum(engine.emulated_paths.values()) == pytest.approx(1.0)
        assert all(path.startswith("host:") for path in engine.emulated_paths)
    finally:
        engine.close()


def test_the_price_changes_no_number() -> None:
    """Peers are a stand-in that depends on nothing but this rank."""
    ours, stock = rank_of(LLAMA, "tp2", 2), rank_of(LLAMA, "tp2", 2, collectives="nccl")
    try:
        assert answer(ours) == answer(stock)
        assert set(stock.emulated_paths) == {"nccl:ring"}
    finally:
        ours.close()
        stock.close()


def test_nothing_of_it_is_verified_or_taken_for_an_answer() -> None:
    wish = Intent(model=LLAMA, platform="cpu", rank_of=2, of_machine=NAMED, parallel="tp2")
    with pytest.raises(RefusedError, match="computes nothing to verify"):
        verify(wish, lambda text: None)
    engine = Engine(wish)
    info = engine.start()
    engine.close()
    assert info.plan["verification"] == {
        "verified": False,
        "text": "not verified: emulated, answers mean nothing",
    }
    client: Any = SimpleNamespace(stats=engine.stats(), alive=True, phase="", hung="")
    state = new_state(ServerConfig(("m",)), client)
    said: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        said.append(dict(message["headers"]).get(b"x-metainfer-emulated"))

    gate = Gate(inner, state.config, lambda: state.emulated)
    scope = {"type": "http", "path": "/ready", "headers": []}
    asyncio.run(gate(scope, None, send))  # type: ignore[arg-type]
    state.engine_ready(info, SimpleNamespace())  # type: ignore[arg-type]
    asyncio.run(gate(scope, None, send))  # type: ignore[arg-type]
    assert said == [None, b"rank 0 of 2 of 8x-rtx-pro-6000d"]
    body = asyncio.run(Health(state).ready()).body
    assert b'"emulated":"rank 0 of 2 of 8x-rtx-pro-6000d"' in body
    assert next(alarm.code for alarm in alarms(state)) == "emulated"


def test_day_0_against_ours_side_by_side() -> None:
    options = OfflineOptions(
        prompt_tokens=8, output_tokens=3, batches=(1, 8), prefill_tokens=24, repeats=1
    )
    wish = Intent(
        model=LLAMA, platform="cpu", rank_of=4, of_machine=NAMED, parallel="2xtp2", context=64,
        chunk_tokens=24, mixed_tokens=8,
    )  # fmt: skip
    with pytest.raises(UsageError, match="has none"):
        emulated.run(wish, OfflineOptions(against="transformers"), lambda text: None)
    kept: list[int] = []
    document = emulated.run(wish, options, lambda text: None, lambda d: kept.append(len(d["rows"])))
    assert kept == [1, 2, 3, 4, 5, 6]  # a run that is cut short leaves what it measured
    assert document["emulated"] == f"rank 0 of 4 of {NAMED}"
    assert document["verification"]["checked"] is False
    sides = document["sides"]
    assert [side["layout"] for side in sides.values()] == ["tp4", "2xtp2"]
    assert sides["day-0"]["paths"] == {"nccl:ring": 1.0}
    assert all(path.startswith("host:") for path in sides["ours"]["paths"])
    rows = document["rows"]
    assert [row["engine"] for row in rows] == ["day-0, emulated"] * 3 + ["ours, emulated"] * 3
    for row in rows:
        assert 0 < row["exposed_wait_us"]["median"] < row["step_us"]["median"]
        assert row["collectives"] > 0 and row["median"] > 0 and row["n"] == 1
    # Eight prompts enter in six steps; what is timed are steps in which all eight decode.
    for row in rows[1::3]:
        assert row["row"] == "decode, batch 8, context 8-13"
        assert row["median"] == pytest.approx(8e6 / row["step_us"]["median"])
    text = emulated.table(document)
    assert text.startswith("EMULATED: rank 0 of 4") and text.count("exposed wait") == 6


def test_each_layout_of_ours_has_its_side_and_one_that_cannot_be_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str | None] = []

    def measure(name: str, wish: Intent, *rest: Any) -> None:
        asked.append(wish.parallel)
        if wish.parallel == "tp16":
            raise RefusedError("no room")

    monkeypatch.setattr(emulated, "_measure", measure)
    wish = Intent(model=LLAMA, platform="cpu", rank_of=2, of_machine=NAMED, context=64)
    options = OfflineOptions(batches=(1,))
    document = emulated.run(wish, options, lambda text: None, layouts=("auto", "tp16", "2x"))
    assert asked == ["tp2", None, "tp16", "2x"]
    assert document["sides"] == {"ours tp16": {"refused": "no room"}}
    assert "ours tp16: no room" in emulated.table(document)
    with pytest.raises(RefusedError):
        emulated.run(replace(wish, parallel="tp16"), options, lambda text: None)
