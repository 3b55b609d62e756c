"""A rank's side of `overlap.py`.

When a step of the wanted size comes, its pass through the model is timed again and again, with
something beside and without, before the step itself runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from metainfer.comm.card_side import CardSide
from metainfer.comm.peers import Ranks
from metainfer.comm.side import IN_ORDER, Pending, Side
from metainfer.core.plan import StepGraph
from metainfer.core.step import Phase, Segment
from metainfer.engine.rank import Rank
from metainfer.executor.graphs import StaticSteps
from metainfer.executor.halves import halves, halves_of
from metainfer.executor.inputs import build
from metainfer.executor.local import LocalExecutor
from metainfer.models.common.lanes import interleave
from metainfer.workers.wire import RankFacts

EVERY_ROW = 1 << 30


class LateSide:
    """As `CardSide`, but what is forked is launched when it is waited for, behind what was launched
    meanwhile; it still depends on nothing but what stood before the fork."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fork(self, work: Callable[[], Any]) -> Pending[Any]:
        begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
        begun.record()
        return _Late(self._stream, begun, work)

    def run(self, work: Callable[[], Any]) -> Any:
        return work()


@dataclass
class _Late(Pending[Any]):
    stream: Any
    begun: Any
    work: Callable[[], Any]

    def wait(self) -> Any:
        self.stream.wait_event(self.begun)
        with torch.cuda.stream(self.stream):
            value = self.work()
        torch.cuda.current_stream().wait_stream(self.stream)
        return value


@dataclass
class Wanted:
    phase: Phase
    size: int
    arms: list[str]
    pairs: int
    seed: int


class Timer:
    """Times passes of `executor`, which goes on as if nothing had happened: a pass writes the same
    entries each time."""

    def __init__(self, executor: LocalExecutor, ranks: Ranks | None = None) -> None:
        ranks = ranks or Ranks()
        self._executor = executor
        self._meet = ranks.tensor if ranks.tensor.size > 1 else ranks.domains
        self._parts = executor._parts
        self._device = self._parts.device
        self._card = self._device.type == "cuda"
        sides = (CardSide(self._device), LateSide(self._device)) if self._card else (IN_ORDER,) * 2
        self._sides: dict[str, Side] = dict(
            zip(("shared first", "routed first"), sides, strict=True)
        )
        self._wanted: Wanted | None = None
        self._found: dict[str, Any] = {}
        self._segment = executor._segment
        executor._segment = self._timed  # type: ignore[method-assign]

    def arm(self, phase: str, size: int, arms: list[str], pairs: int, seed: int) -> None:
        """Time the next step of `phase` with `size` tokens."""
        self._wanted, self._found = Wanted(Phase(phase), size, list(arms), pairs, seed), {}

    def taken(self) -> dict[str, Any]:
        """By arm: ``pairs`` of seconds (off, arm), which went ``first``, and whether results were
        ``equal``."""
        if self._wanted is not None:
            raise RuntimeError(f"no {self._wanted.phase.value} of {self._wanted.size} tokens came")
        return self._found

    def _timed(self, segment: Segment) -> Any:
        wanted = self._wanted
        tokens = segment.ranks[0].tokens + segment.ranks[0].padding
        if segment.phase is Phase.CHUNK and self._parts.prompts is not None:
            tokens = sum(rank.tokens for rank in segment.ranks)
        if wanted is not None and (segment.phase, tokens) == (wanted.phase, wanted.size):
            self._wanted = None
            captured = segment.phase is Phase.DECODE and self._executor._tables is not None
            run = self._replays(segment, wanted.arms) if captured else self._passes(segment)
            self._found = {arm: self._compared(arm, run, wanted) for arm in wanted.arms}
            self._set_arm("off")
        return self._segment(segment)

    def _compared(
        self, arm: str, run: Callable[[str], torch.Tensor], wanted: Wanted
    ) -> dict[str, Any]:
        """``equal``: of three passes each, by turns, since what is wrong may be so at times."""
        same_as = "halves" if arm == "turns" else "off"
        equal = arm == "halves" or all(
            torch.equal(run(same_as).clone(), run(arm).clone()) for _ in range(3)
        )
        for name in ("off", arm) * 2:
            run(name)
        rng = random.Random(f"{wanted.seed} {arm}")
        pairs, first = [], []
        for _ in range(wanted.pairs):
            order = ["off", arm]
            rng.shuffle(order)
            took = {name: self._seconds(lambda name=name: run(name)) for name in order}
            pairs.append([took["off"], took[arm]])
            first.append(order[0] == arm)
        return {"pairs": pairs, "first": first, "equal": equal}

    def _seconds(self, call: Callable[[], object]) -> float:
        """From when all ranks are here to when this one's device is done."""
        self._meet.sum(torch.zeros(8, device=self._device))
        self._wait()
        begin = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self._card:
            torch.cuda.synchronize(self._device)

    def _set_arm(self, arm: str) -> None:
        model = self._parts.model
        model.beside = self._sides.get(arm, IN_ORDER)
        model.beside_rows = EVERY_ROW if arm in self._sides else 0

    def _passes(self, segment: Segment) -> Callable[[str], torch.Tensor]:
        """Op by op, as the executor runs a chunk, up to its last rows' logits."""
        parts, rank = self._parts, segment.ranks[0]
        ops, model = parts.ops.phase(segment.phase), self._parts.model

        def beside(arm: str) -> AbstractContextManager[None]:
            name, _, count = arm.partition(" ")
            if name == "pieces":
                return parts.turns.in_pieces(int(count))
            return parts.turns if arm in ("turns", "beside") else nullcontext()

        @torch.inference_mode()
        def shared(arm: str) -> torch.Tensor:
            assert parts.prompts is not None
            cut = halves_of(segment) if arm in ("turns", "halves") else (segment,)
            with beside(arm):
                found = parts.prompts.computed(cut, self._executor._slots, ops)
            return torch.cat([parts.prompts.model.normed(each.hidden) for each in found])

        if parts.prompts is not None and segment.phase is Phase.CHUNK:
            return shared

        @torch.inference_mode()
        def run(arm: str) -> torch.Tensor:
            self._set_arm(arm)
            cut = halves(rank) if arm in ("turns", "halves") else (rank,)
            inputs = [
                build(part, self._executor._slots, parts.groups).to(self._device) for part in cut
            ]
            lanes = [model.lane(each, parts.store.layers, ops) for each in inputs]
            with beside(arm):
                found = interleave(lanes)
            return model.logits(found[-1], inputs[-1], ops)

        return run

    def _replays(self, segment: Segment, arms: list[str]) -> Callable[[str], torch.Tensor]:
        """Each arm's graph captured for this size alone."""
        tokens = segment.ranks[0].tokens
        shape = StepGraph(phase=Phase.DECODE.value, tokens=tokens, runs=tokens)
        executor, held = self._executor, {}
        assert executor._tables is not None
        for arm in ("off", *arms):
            self._set_arm(arm)
            held[arm] = StaticSteps(self._parts, executor._tables, executor.capture)
            held[arm].capture(shape)

        @torch.inference_mode()
        def run(arm: str) -> torch.Tensor:
            out = held[arm].run(segment, executor._slots, eager=False)
            assert out is not None
            return out.logits

        return run


class TimedRank(Rank):
    """A rank whose passes are timed."""

    def __init__(self, facts: RankFacts) -> None:
        super().__init__(facts)
        self._timer = Timer(self._side.executor, self._links.ranks)

    def arm(self, *wanted: Any) -> None:
        self._timer.arm(*wanted)

    def taken(self) -> dict[str, Any]:
        return self._timer.taken()
