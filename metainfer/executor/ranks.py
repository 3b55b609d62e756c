"""Several ranks that act as one device: a step plan goes to all, and what they decided must agree.

Every rank holds its part of the weights and one domain's cache, runs the model and draws tokens by
itself: draws are a pure function of logits and seeds, so the ranks of a domain have the same. The
first one answers; the others send a digest of their answer, and a difference ends the engine.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from metainfer.core.errors import InternalError
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import RunResult, StepPlan, StepResult
from metainfer.executor.domains import joined, of_domain
from metainfer.executor.local import MOST_OPEN, LocalExecutor
from metainfer.executor.slots import OpenGrammar

_plans = msgspec.msgpack.Decoder(StepPlan)
_answers = msgspec.msgpack.Decoder(tuple[RunResult, ...])


class Group(Protocol):
    """As `workers.group.WorkerGroup`."""

    def call(self, method: str, *arguments: object) -> list[Any]: ...

    def close(self, grace_s: float = ...) -> None: ...


class RankExecutor:
    """The engine's side. `group`: workers with the methods of `RankSide`, in rank order."""

    def __init__(self, group: Group, layout: LayoutPlan, slots: int) -> None:
        self._group, self._layout, self._slots = group, layout, slots
        self._open: deque[StepResult] = deque()

    def use_grammars(self, make: OpenGrammar) -> None:
        """Every rank opens a library of its own: `make` cannot travel."""
        self._group.call("use_grammars")

    def warm(self, on_bucket: Callable[[str], None] = lambda name: None) -> None:
        on_bucket(f"{self._layout.ranks} ranks")
        self._group.call("warm")

    def submit(self, plan: StepPlan) -> None:
        if len(self._open) >= MOST_OPEN:
            raise InternalError("three plans are open")
        begin = time.perf_counter()
        answers = self._group.call("execute", msgspec.msgpack.encode(plan))
        self._open.append(self._together(plan, answers, begin))

    def collect(self) -> StepResult:
        return self._open.popleft()

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.collect()

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes that the first rank holds: the ledger is of one card."""
        held: dict[str, int] = self._group.call("held_bytes")[0]
        return held

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes that ranks received while they shared rows of chunks, over all ranks: ``loans``
        (what was cached before), ``entries`` (what they wrote), ``edges`` (raw rows)."""
        each: list[dict[str, int]] = self._group.call("moved_bytes")
        total: Counter[str] = Counter()
        for moved in each:
            total.update(moved)
        return dict(total)

    def close(self) -> None:
        self._open.clear()
        self._group.close()

    def _together(self, plan: StepPlan, answers: Sequence[Any], begin: float) -> StepResult:
        tensor = self._layout.tensor
        digests = [digest for digest, _ in answers]
        for rank, digest in enumerate(digests):
            first = rank // tensor * tensor
            if digest != digests[first]:
                raise InternalError(
                    f"ranks {first} and {rank} drew different tokens in step {plan.step}"
                )
        runs = [_answers.decode(body) for _, body in answers[::tensor]]
        try:
            found = joined(plan, runs, self._slots)
        except ValueError as error:
            raise InternalError(f"step {plan.step}: {error}") from None
        common = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
        return StepResult(plan.step, found, time.perf_counter() - begin, common)


class RankSide:
    """A rank's side: its executor, given its domain's part of each plan. `leads`: it answers for
    its domain. `level`, `shared`: see `of_domain`."""

    def __init__(
        self,
        executor: LocalExecutor,
        domain: int,
        slots: int,
        *,
        leads: bool,
        level: bool,
        shared: bool = False,
    ) -> None:
        self.executor = executor
        self._domain, self._slots = domain, slots
        self._leads, self._level, self._shared = leads, level, shared

    def execute(self, plan: bytes) -> tuple[str, bytes]:
        """Digest of the answer, and the answer (msgpack) of a rank that leads."""
        mine = of_domain(
            _plans.decode(plan),
            self._domain,
            self._slots,
            level=self._level,
            shared=self._shared,
        )
        body = msgspec.msgpack.encode(self.executor.execute(mine).runs)
        return hashlib.sha256(body).hexdigest()[:16], body if self._leads else b""
