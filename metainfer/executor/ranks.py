"""Several ranks that act as one device: a step plan goes to all, and what they decided must agree.

Every rank holds its part of the weights and one domain's cache, runs the model and draws tokens by
itself: draws are a pure function of logits and seeds, so the ranks of a domain have the same. The
first one answers; the others send a digest of their answer, and a difference ends the engine.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from metainfer.core.errors import InternalError
from metainfer.core.plan import LayoutPlan, StepGraph
from metainfer.core.step import (
    ALL_LAYERS,
    Phase,
    RunResult,
    Segment,
    StepPlan,
    StepResult,
    TokenRun,
)
from metainfer.executor.domains import joined, of_domain
from metainfer.executor.late import DRAFTS, OP_BY_OP
from metainfer.executor.local import MOST_OPEN, LocalExecutor
from metainfer.executor.slots import GRAMMAR, HISTORY, OpenGrammar

_plans = msgspec.msgpack.Decoder(StepPlan)
_answers = msgspec.msgpack.Decoder(tuple[RunResult, ...])

RankAnswer = tuple[str, bytes, float, dict[str, int]]
"""Digest of an answer; the answer itself (msgpack) of a rank that leads; seconds; and how the draws
behind captured steps were launched so far."""


class Group(Protocol):
    """As `workers.group.WorkerGroup`."""

    def call(self, method: str, *arguments: object) -> list[Any]: ...

    def post(self, method: str, *arguments: object) -> None: ...

    def close(self, grace_s: float = ...) -> None: ...


class RankExecutor:
    """The engine's side. `group`: workers with the methods of `RankSide`, in rank order; `graphs`:
    the steps that each of them captured.

    A plan is posted, and its answer read when it is collected, so ranks launch a step behind one
    that nobody has read yet, as one device does (ADR 0033). Whether they do is up to each: what it
    computes does not depend on when it reads. What is asked here is asked to lose no time.
    """

    def __init__(
        self, group: Group, layout: LayoutPlan, slots: int, graphs: Sequence[StepGraph] = ()
    ) -> None:
        self._group, self._layout, self._slots = group, layout, slots
        self._graphs = tuple(graphs)
        self._asks: dict[int, str] = {}  # of slots whose draws ask for all tokens before them
        self._open: deque[StepPlan] = deque()
        self._draws: list[dict[str, int]] = []

    def use_grammars(self, make: OpenGrammar) -> None:
        """Every rank opens a library of its own: `make` cannot travel."""
        self._group.call("use_grammars")

    def warm(self, on_bucket: Callable[[str], None] = lambda name: None) -> None:
        on_bucket(f"{self._layout.ranks} ranks")
        for said in sorted({text for found in self._group.call("warm") for text in found or ()}):
            on_bucket(said)

    def submit(self, plan: StepPlan) -> None:
        if len(self._open) >= MOST_OPEN:
            raise InternalError("three plans are open")
        for slot in plan.released:
            self._asks.pop(slot, None)
        for new in plan.new:
            history = HISTORY if new.params.counts_tokens else ""
            self._asks[new.slot] = GRAMMAR if new.params.grammar is not None else history
        self._group.post("submit", msgspec.msgpack.encode(plan))
        self._open.append(plan)

    @property
    def unread(self) -> bool:
        """Whether the latest open plan may be on its way still: it was launched as captured."""
        return bool(self._open) and not self._why_alone(self._open[-1])

    def waits_for(self, plan: StepPlan) -> str:
        """As `LocalExecutor.waits_for`, from what the engine knows."""
        if not self.unread:
            return ""
        drawing = {run.slot for ahead in self._open for run in _runs(ahead) if run.samples}
        asking = (self._asks.get(run.slot, "") for run in _runs(plan) if run.slot in drawing)
        return self._why_alone(plan) or next(filter(None, asking), "")

    def _why_alone(self, plan: StepPlan) -> str:
        """Why ranks read a step before one is launched behind it; empty where they need not."""
        if not all(map(self._captured, plan.segments)):
            return OP_BY_OP
        return DRAFTS if any(segment.drafts for segment in plan.segments) else ""

    def _captured(self, segment: Segment) -> bool:
        """Whether every domain finds a captured step that holds its part; all compute as many
        tokens as the widest."""
        tokens = max(rank.tokens + rank.padding for rank in segment.ranks)
        runs = max(len(rank.runs) for rank in segment.ranks)
        every = segment.phase in (Phase.DECODE, Phase.VERIFY)
        ends = all(run.logits <= 1 for rank in segment.ranks for run in rank.runs)
        return (
            segment.stop_layer == ALL_LAYERS
            and (every or ends)
            and any(
                graph.phase == segment.phase.value and graph.tokens >= tokens and graph.runs >= runs
                for graph in self._graphs
            )
        )

    def collect(self) -> StepResult:
        plan = self._open.popleft()
        return self._together(plan, self._group.call("collect"))

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.collect()

    @property
    def draws(self) -> dict[str, int]:
        """As `LocalExecutor.draws`, of all domains, when the latest answer was given."""
        total: Counter[str] = Counter()
        for draws in self._draws:
            total.update(draws)
        return dict(total)

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes that the first rank holds: the ledger is of one card."""
        held: dict[str, int] = self._group.call("held_bytes")[0]
        return held

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes that ranks received while they shared rows of chunks, over all ranks: ``loans``
        (what was cached before), ``entries`` (what they wrote), ``edges`` (raw rows), ``drafts``
        (rows that a model that drafts goes on from), ``adapters`` (their places, a run)."""
        each: list[dict[str, int]] = self._group.call("moved_bytes")
        total: Counter[str] = Counter()
        for moved in each:
            total.update(moved)
        return dict(total)

    def close(self) -> None:
        self._open.clear()
        self._group.close()

    def _together(self, plan: StepPlan, answers: Sequence[Any]) -> StepResult:
        tensor = self._layout.tensor
        digests = [digest for digest, *_ in answers]
        for rank, digest in enumerate(digests):
            first = rank // tensor * tensor
            if digest != digests[first]:
                raise InternalError(
                    f"ranks {first} and {rank} drew different tokens in step {plan.step}"
                )
        runs = [_answers.decode(body) for _, body, *_ in answers[::tensor]]
        try:
            found = joined(plan, runs, self._slots)
        except ValueError as error:
            raise InternalError(f"step {plan.step}: {error}") from None
        common = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
        self._draws = [draws for *_, draws in answers[::tensor]]
        return StepResult(plan.step, found, max(seconds for _, _, seconds, _ in answers), common)


def _runs(plan: StepPlan) -> Iterator[TokenRun]:
    return (run for part in plan.segments for rank in part.ranks for run in rank.runs)


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

    def submit(self, plan: bytes) -> None:
        """Launch this domain's part."""
        mine = of_domain(
            _plans.decode(plan),
            self._domain,
            self._slots,
            level=self._level,
            shared=self._shared,
        )
        self.executor.submit(mine)

    def collect(self) -> RankAnswer:
        """What came of the oldest open plan."""
        result = self.executor.collect()
        body = msgspec.msgpack.encode(result.runs)
        digest = hashlib.sha256(body).hexdigest()[:16]
        return digest, body if self._leads else b"", result.seconds, self.executor.draws
