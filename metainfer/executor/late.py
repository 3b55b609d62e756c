"""A step that was launched and is read later: what is on its way, and what it took.

A device obeys launches in order, so a step may be launched before the one ahead of it was read:
the tokens that it needs are on the device already. What is read is copied to the host behind the
step, before anything launched later can overwrite it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from metainfer.core.step import RunResult, StepPlan, StepResult, TokenRun
from metainfer.executor.slots import SlotTable

Settle = Callable[[], list[RunResult]]
"""Reads what a segment left on the host: its results, and tokens into the slots' histories."""


class Stretch:
    """What is launched between its making and `end`: wait for it, and its seconds.

    By the device's own clock where it has one, so that waiting in its queue does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._begin = self._end = None
        if device.type == "cuda":
            self._begin, self._end = (_event() for _ in range(2))
            self._begin.record()
        self._since, self._seconds = time.perf_counter(), 0.0

    def end(self) -> None:
        if self._end is not None:
            self._end.record()
        self._seconds = time.perf_counter() - self._since

    def wait(self) -> float:
        """Seconds, once everything in it has run."""
        if self._begin is None or self._end is None:
            return self._seconds
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Launched:
    """One plan under way. `result` reads it: only in the order of launch."""

    def __init__(self, plan: StepPlan, stretch: Stretch) -> None:
        self.plan = plan
        self.parts: list[Settle] = []
        self._stretch = stretch
        self._result: StepResult | None = None

    @property
    def unread(self) -> bool:
        return self._result is None

    def result(self) -> StepResult:
        """Wait for the device and hand the tokens to their slots, the first time."""
        if self._result is None:
            seconds = self._stretch.wait()
            runs = [run for part in self.parts for run in part()]
            self._result = StepResult(self.plan.step, tuple(runs), seconds)
        return self._result


OP_BY_OP, DRAFTS = "op_by_op", "drafts"
"""Why a step is not launched before the one ahead of it was read: its ids come from the host, since
it was not captured · it verifies drafts. `slots` has the other reasons."""


def asked(runs: Iterable[TokenRun], table: SlotTable) -> str:
    """Why the draws of `runs` ask for tokens that nobody has read yet; empty where none does."""
    states = (table.states.get(run.slot) for run in runs)
    return next((s.asks for s in states if s is not None and s.awaited and s.asks), "")
