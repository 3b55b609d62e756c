"""The flight recorder: what the last steps were, in memory that outlives the engine process.

A block of fixed size: a head that says which step is in flight, a ring of steps, a ring of events.
The engine writes it, whoever holds the block reads it at any time, also while the engine hangs or
after it was killed. Requests appear as hashes of their ids; token ids and text never appear.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from metainfer.core.step import Segment, StepPlan, StepResult, TokenRun

STEPS = 200
EVENTS = 50
MOST_RUNS = 64
"""Runs of a segment that are listed; of the others only the number is kept."""

_HEAD = struct.Struct("<8sQQQqd?")  # magic, begun, ended, events, step, since, busy
_MAGIC = b"MIflight"
_LENGTHS = struct.Struct("<II")
_HEAD_BYTES = 64
_STEP_BYTES = 8192
_PLAN_BYTES = 7168
_EVENT_BYTES = 2048
SIZE = _HEAD_BYTES + STEPS * _STEP_BYTES + EVENTS * _EVENT_BYTES

Block = memoryview
"""`SIZE` writable bytes."""


def hashed(request_id: str) -> str:
    """The name of a request outside the engine: clients choose ids, and may write anything."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:12]


class FlightRecorder:
    """Writes a block. Costs a few tens of microseconds a step; not thread-safe."""

    def __init__(self, block: Block | None = None) -> None:
        self.block = memoryview(bytearray(SIZE)) if block is None else block
        self._begun = self._ended = self._noted = 0
        self._names: dict[int, str] = {}  # slot -> hash; a step that changes them makes a new one
        self._open: deque[tuple[int, dict[int, str]]] = deque()  # step, names; oldest first
        self._since = 0.0  # when the oldest open step became that
        self._pack = msgspec.msgpack.Encoder().encode
        self._head()

    def begin(self, plan: StepPlan) -> None:
        """The plan is about to be executed, behind those that have not ended."""
        if plan.released or plan.new:
            self._names = {s: n for s, n in self._names.items() if s not in plan.released}
        entered = []
        for new in plan.new:
            self._names[new.slot] = name = hashed(new.request_id)
            entered.append((name, new.slot, len(new.prompt), new.computed))
        pages: dict[int, int] = {}
        for grant in plan.pages:
            pages[grant.group] = pages.get(grant.group, 0) + len(grant.pages)
        counts = (len(plan.new), len(plan.released), len(plan.copies), len(plan.moves))
        for listed in (MOST_RUNS, 0):
            parts = (
                plan.step,
                time.time(),
                [self._segment(segment, listed) for segment in plan.segments],
                entered[:listed],
                list(pages.items()),
                counts,
            )
            body = self._pack(parts)
            if len(body) <= _PLAN_BYTES:
                break
        at = self._place(self._begun)
        _LENGTHS.pack_into(self.block, at, len(body), 0)
        start = at + _LENGTHS.size
        self.block[start : start + len(body)] = body
        self._begun += 1
        if not self._open:
            self._since = time.monotonic()
        self._open.append((plan.step, self._names))
        self._head()

    def _segment(self, segment: Segment, most: int) -> tuple[Any, ...]:
        runs = [run for rank in segment.ranks for run in rank.runs]
        tokens = sum(len(run.tokens) for run in runs)
        listed = [self._run(run) for run in runs[:most]]
        return segment.phase.value, segment.layout, segment.bucket, len(runs), tokens, listed

    def _run(self, run: TokenRun) -> tuple[Any, ...]:
        return (
            self._names.get(run.slot, ""),
            run.slot,
            run.start,
            len(run.tokens),
            run.drafts,
            run.samples,
        )

    def name_of(self, slot: int) -> str:
        """The hash of the request that holds `slot` in the oldest open step."""
        return self._open[0][1].get(slot, "")

    def end(self, result: StepResult) -> None:
        """The oldest open step gave `result`."""
        faults = [(self.name_of(run.slot), run.code or "fault") for run in result.runs if run.error]
        drawn = sum(len(run.tokens) for run in result.runs)
        self._finish((result.seconds, drawn, faults[:16], ""))

    def failed(self, error: BaseException) -> None:
        """The oldest open step raised; the kind of error is kept, its text is not."""
        self._finish((0.0, 0, (), type(error).__name__))

    def _finish(self, outcome: tuple[Any, ...]) -> None:
        at = self._place(self._ended)
        length, _ = _LENGTHS.unpack_from(self.block, at)
        body = self._pack(outcome)
        start = at + _LENGTHS.size + _PLAN_BYTES
        self.block[start : start + len(body)] = body
        _LENGTHS.pack_into(self.block, at, length, len(body))
        self._ended += 1
        self._open.popleft()
        self._since = time.monotonic()
        self._head()

    def note(self, kind: str, text: str, **numbers: object) -> None:
        """An event: `text` is ours, never a user's."""
        body = self._pack((time.time(), kind, text[:1000], numbers))
        at = _HEAD_BYTES + STEPS * _STEP_BYTES + self._noted % EVENTS * _EVENT_BYTES
        if len(body) + _LENGTHS.size > _EVENT_BYTES:
            body = self._pack((time.time(), kind, text[:1000], {}))
        start = at + _LENGTHS.size
        self.block[start : start + len(body)] = body
        _LENGTHS.pack_into(self.block, at, len(body), 0)
        self._noted += 1
        self._head()

    def _place(self, number: int) -> int:
        return _HEAD_BYTES + number % STEPS * _STEP_BYTES

    def _head(self) -> None:
        counts = (self._begun, self._ended, self._noted)
        step = self._open[0][0] if self._open else -1
        _HEAD.pack_into(self.block, 0, _MAGIC, *counts, step, self._since, bool(self._open))


def in_flight(block: Block) -> tuple[int, float] | None:
    """The step that is being executed and for how many seconds; None when none is."""
    magic, _, _, _, step, begun, busy = _HEAD.unpack_from(block, 0)
    return (step, time.monotonic() - begun) if magic == _MAGIC and busy else None


def read(block: Block) -> dict[str, Any]:
    """The block as plain data, oldest first. What was half written is left out."""
    magic, begun, ended, noted, _, _, busy = _HEAD.unpack_from(block, 0)
    if magic != _MAGIC:
        return {"steps": [], "events": [], "in_flight": None}
    steps = list(_steps(block, begun, ended))
    open_ = (step for step in steps if "outcome" not in step)
    return {
        "steps": steps,
        "events": list(_events(block, noted)),
        "in_flight": next(open_, None) if busy else None,
    }


def _steps(block: Block, begun: int, ended: int) -> Iterator[dict[str, Any]]:
    for number in range(max(0, begun - STEPS), begun):
        at = _HEAD_BYTES + number % STEPS * _STEP_BYTES
        length, rest = _LENGTHS.unpack_from(block, at)
        start = at + _LENGTHS.size
        try:
            plan = msgspec.msgpack.decode(block[start : start + length])
            found = _plan(plan)
            if rest and number < ended:
                tail = start + _PLAN_BYTES
                found["outcome"] = _outcome(msgspec.msgpack.decode(block[tail : tail + rest]))
        except (msgspec.DecodeError, ValueError, TypeError, IndexError):
            continue  # being written just now
        yield found


def _plan(plan: Any) -> dict[str, Any]:
    step, at, segments, entered, pages, (new, released, copies, moves) = plan
    return {
        "step": step,
        "at": at,
        "segments": [
            {
                "phase": phase,
                "layout": layout,
                "bucket": bucket,
                "runs": runs,
                "tokens": tokens,
                "listed": [
                    dict(
                        zip(
                            ("request", "slot", "start", "tokens", "drafts", "samples"),
                            run,
                            strict=True,
                        )
                    )
                    for run in listed
                ],
            }
            for phase, layout, bucket, runs, tokens, listed in segments
        ],
        "entered": [
            dict(zip(("request", "slot", "tokens", "computed"), row, strict=True))
            for row in entered
        ],
        "pages": [{"group": group, "granted": count} for group, count in pages],
        "new": new,
        "released": released,
        "copies": copies,
        "moves": moves,
    }


def _outcome(outcome: Any) -> dict[str, Any]:
    seconds, drawn, faults, error = outcome
    return {
        "seconds": seconds,
        "drawn": drawn,
        "faults": [{"request": name, "code": code} for name, code in faults],
        "error": error,
    }


def _events(block: Block, noted: int) -> Iterator[dict[str, Any]]:
    for number in range(max(0, noted - EVENTS), noted):
        at = _HEAD_BYTES + STEPS * _STEP_BYTES + number % EVENTS * _EVENT_BYTES
        length, _ = _LENGTHS.unpack_from(block, at)
        start = at + _LENGTHS.size
        try:
            when, kind, text, numbers = msgspec.msgpack.decode(block[start : start + length])
        except (msgspec.DecodeError, ValueError, TypeError):
            continue
        yield {"at": when, "kind": kind, "text": text, **numbers}


def describe(step: dict[str, Any]) -> str:
    """A step of `read` in one line: ``step 17: decode, 3 runs, 3 tokens``."""
    parts = [
        f"{segment['phase']}, {segment['runs']} runs, {segment['tokens']} tokens"
        for segment in step["segments"]
    ]
    return f"step {step['step']}: {'; '.join(parts)}"
