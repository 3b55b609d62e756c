"""A device that computes nothing: it prices each plan, moves the clock, and answers with some ids.

Ids depend on the request and the place alone, so that a session's next prompt finds its answer in
the cache. Drafts are accepted by a seeded draw with the chance that a workload states.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from metainfer.core.clock import VirtualClock
from metainfer.core.request import Request
from metainfer.core.step import PENDING, RunResult, StepPlan, StepResult, TokenRun
from metainfer.planner.amounts import Price
from metainfer.planner.steps import StepCost

_STRIDE = 7919


class PricedDevice:
    """An `Executor`, synchronous.

    Args:
        acceptance: chance that a draft is accepted, given that those before it were.
        token_s: seconds of a token on its way to its client, which the next step waits for.
    """

    def __init__(
        self,
        cost: StepCost,
        price: Price,
        clock: VirtualClock,
        *,
        acceptance: float = 0.0,
        seed: int = 0,
        token_s: float = 0.0,
    ) -> None:
        self._cost, self._price, self._clock = cost, price, clock
        self._token_s = token_s
        self._acceptance, self._chance = acceptance, random.Random(seed)
        self._vocab = max(cost.work.vocab, 2)
        self._drawn: dict[int, int] = {}  # slot -> ids drawn so far, from a start of its own
        self.steps: Counter[str] = Counter()  # by phase
        self.busy_s: Counter[str] = Counter()

    def submit(self, plan: StepPlan) -> None:
        self._open = self.execute(plan)

    def collect(self) -> StepResult:
        return self._open

    def execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.released:
            self._drawn.pop(slot, None)
        for entry in plan.new:
            self._drawn[entry.slot] = hash(entry.prompt[:64]) % self._vocab + entry.sample_index
        seconds, results = 0.0, []
        for segment in plan.segments:
            took = self._price(segment.phase, self._cost.segment(segment))
            self.steps[segment.phase.value] += 1
            self.busy_s[segment.phase.value] += took  # type: ignore[assignment]
            seconds += took
            for rank in segment.ranks:
                results += [self._run(run) for run in rank.runs]
        seconds += self._token_s * sum(len(result.tokens) for result in results)
        self._clock.advance(seconds)
        return StepResult(plan.step, tuple(results), seconds)

    def close(self) -> None:
        self._drawn.clear()

    def _run(self, run: TokenRun) -> RunResult:
        if not run.samples:
            return RunResult(run.slot)
        if not run.drafts:
            return RunResult(run.slot, (self._next(run.slot),))
        accepted = 0
        while accepted < run.drafts and self._chance.random() < self._acceptance:
            accepted += 1
        first = len(run.tokens) - run.drafts
        drafts = [
            self._next(run.slot) if token == PENDING else token
            for token in run.tokens[first : first + accepted]
        ]
        return RunResult(run.slot, (*drafts, self._next(run.slot)), accepted_drafts=accepted)

    def _next(self, slot: int) -> int:
        count = self._drawn[slot]
        self._drawn[slot] = count + 1
        return count * _STRIDE % self._vocab


class AnyDrafts:
    """A `DraftSource` that always has something to say; `PricedDevice` decides what it is worth."""

    def propose(self, request: Request, tokens: Sequence[int], limit: int) -> Sequence[int]:
        return [0] * limit

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""
