"""The recorder's block as its reader sees it, a hang seen from outside, dumps on a full disk."""

from __future__ import annotations

import json
import logging
import random
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.request import SamplingParams
from metainfer.core.step import (
    NewRequest,
    PageGrant,
    Phase,
    RankTokens,
    RunResult,
    Segment,
    StepPlan,
    StepResult,
    TokenRun,
)
from metainfer.engine import overseer, recorder
from metainfer.engine.overseer import Overseer
from metainfer.engine.recorder import FlightRecorder, hashed, in_flight, read

SECRET = 271828


def plan_of(step: int, runs: int, tokens: int, name: str = "r") -> StepPlan:
    new = tuple(
        NewRequest(f"{name}-{i}", i, 0, (SECRET,) * tokens, tokens, 0, SamplingParams())
        for i in range(runs)
    )
    listed = tuple(TokenRun(i, 0, (SECRET,) * tokens, 1, 0, True) for i in range(runs))
    segment = Segment(Phase.CHUNK, "single", (RankTokens(listed),))
    return StepPlan(step, (segment,), new, (PageGrant(0, 0, 0, (1, 2, 3)),))


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 30), st.text())
def test_any_plan_is_read_back(steps: int, runs: int, tokens: int, name: str) -> None:
    book = FlightRecorder()
    for step in range(max(0, steps - 3), steps):
        book.begin(plan_of(step, runs, tokens, name))
        assert in_flight(book.block) is not None
        assert read(book.block)["in_flight"]["step"] == step
        book.end(StepResult(step, tuple(RunResult(i, (SECRET,)) for i in range(runs)), 0.5))
        assert in_flight(book.block) is None
    found = read(book.block)
    assert [row["step"] for row in found["steps"]] == list(range(max(0, steps - 3), steps))
    for row in found["steps"]:
        (segment,) = row["segments"]
        assert (segment["runs"], segment["tokens"]) == (runs, runs * tokens)
        assert row["outcome"]["drawn"] == runs and row["pages"] == [{"group": 0, "granted": 3}]
        assert all(run["request"] == hashed(f"{name}-{run['slot']}") for run in segment["listed"])
    assert str(SECRET) not in json.dumps(found)


def test_a_block_of_garbage_is_read_without_fault(rng: random.Random) -> None:
    """The writer may be killed in the middle of a write."""
    book = FlightRecorder()
    for step in range(5):
        book.begin(plan_of(step, 3, 4))
        book.end(StepResult(step, (), 0.1))
    for _ in range(200):
        block = bytearray(book.block)
        at = rng.randrange(64, 64 + 5 * 8192)
        block[at : at + 40] = rng.randbytes(40)
        assert len(read(memoryview(block))["steps"]) <= 5
    assert read(memoryview(bytearray(recorder.SIZE)))["steps"] == []
    for value in (5, [], [1, 2, 3], [1, 2, [7], [], [], [1, 2, 3, 4]], "text", None):
        block, body = bytearray(book.block), msgspec.msgpack.encode(value)
        block[64:72] = len(body).to_bytes(8, "little")
        block[72 : 72 + len(body)] = body
        assert [step["step"] for step in read(memoryview(block))["steps"]] == [1, 2, 3, 4]


def test_a_plan_that_is_too_large_keeps_its_numbers() -> None:
    book = FlightRecorder()
    one = plan_of(0, 64, 2)
    book.begin(StepPlan(0, one.segments * 9, one.new, one.pages))
    book.end(StepResult(0, (), 0.1))
    book.begin(plan_of(1, 1, 1))
    first, second = read(book.block)["steps"]
    assert [segment["runs"] for segment in first["segments"]] == [64] * 9
    assert first["segments"][0]["listed"] == [] and first["outcome"]["seconds"] == 0.1
    assert second["segments"][0]["listed"]


def watched(hang_after_s: float) -> tuple[Overseer, FlightRecorder]:
    over = Overseer(hang_after_s)
    over.close_descriptor()
    return over, FlightRecorder(memoryview(over._map))


def test_a_step_hangs_only_after_its_time(caplog: pytest.LogCaptureFixture) -> None:
    """Time is moved by hand: the block says since when a step is in flight."""
    over, book = watched(100.0)
    assert not over.look() and not over.hung
    book.begin(plan_of(7, 2, 5))
    assert not over.look() and not over.hung
    since(book, 101)
    assert not over.look() and "step 7: chunk, 2 runs, 10 tokens" in over.hung
    since(book, 201)
    assert over.look()
    book.end(StepResult(7, (), 0.1))
    with caplog.at_level(logging.WARNING):
        assert not over.look() and not over.hung
    assert "step 7 came to an end" in caplog.text


def test_nothing_hangs_when_the_watch_is_off() -> None:
    over, book = watched(0.0)
    book.begin(plan_of(0, 1, 1))
    since(book, 1e9)
    assert not over.look() and not over.hung


def since(book: FlightRecorder, seconds: float) -> None:
    """Let the step in flight have begun `seconds` ago."""
    head = recorder._HEAD
    fields = list(head.unpack_from(book.block, 0))
    fields[5] = time.monotonic() - seconds
    head.pack_into(book.block, 0, *fields)


def test_dumps_are_few_and_a_full_disk_costs_only_the_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path))
    over, book = watched(1.0)
    book.begin(plan_of(1, 1, 1))
    assert over.save("hang", {"cause": "x"}) is not None
    assert over.save("hang", {"cause": "y"}) is None  # too soon
    for number in range(20):
        assert over.save(f"reason-{number}", {}) is not None
    kept = sorted(overseer.folder().glob("*.json"))
    assert len(kept) == overseer.KEPT
    latest = overseer.latest()
    assert latest is not None and latest["reason"] == "reason-19"
    assert latest["flight"]["in_flight"]["step"] == 1
    kept[-1].write_text("{")
    latest = overseer.latest()
    assert latest is not None and latest["reason"] == "reason-18"

    def full(self: Path, text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert over.save("late", {}) is None
    assert "no dump is kept: No space left" in caplog.text
