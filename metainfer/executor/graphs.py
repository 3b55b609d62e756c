"""Static steps: decode, verify and short chunks by bucket, captured once and replayed.

Eager V4 pays hundreds of launches a step; a replay is one. A bucket's step is a function of its
buffers and of the tables on the device (`static`), so what is replayed is also what `eager` runs
op by op: the same ops on the same shapes, equal bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from metainfer.core.plan import StepGraph
from metainfer.core.step import ALL_LAYERS, Phase, RankTokens, Segment
from metainfer.executor.drawing import CapturedDraws, StepDraws, first_rows
from metainfer.executor.inputs import adapter_places, step_ids
from metainfer.executor.static import DeviceTables, StepBuffers, step_inputs
from metainfer.executor.transfer import to_device
from metainfer.models.common.inputs import SegmentInputs
from metainfer.ops.sample.inputs import SampleInputs, SampleOutput

if TYPE_CHECKING:
    from metainfer.executor.local import LocalParts
    from metainfer.executor.slots import SlotTable


@dataclass(slots=True)
class StaticOutput:
    """What a step leaves, in the graph's memory: read it before the next replay.

    `logits` [R, V]: in decode and verify of every token, else of each run's last. `finite` bool
    [T]: whether each token's row for the head is; None in decode, where logits show it. `best`: the
    likeliest token of each row, where the sampler can be captured. `hidden`, `inputs`: for a model
    that drafts. `draws`: graphs that draw from these very logits; None where they are of no graph.
    """

    logits: Tensor
    finite: Tensor | None
    best: SampleOutput | None
    hidden: Any
    inputs: SegmentInputs
    draws: CapturedDraws | None = None


class Replayed(Protocol):
    """A captured step."""

    def replay(self) -> None: ...


Step = Callable[[], StaticOutput]
Left = TypeVar("Left")


class Capture(Protocol):
    """Runs a step once or more, the last time recording it; what it left is rewritten by
    replays."""

    def __call__(self, step: Callable[[], Left], /) -> tuple[Replayed, Left]: ...


@cache
def _side_stream(device: int) -> Any:
    """The stream on which everything is captured. Libraries keep a workspace for each stream that
    they ever saw (cuBLAS on an H200: 32 MiB): one for all captures of the process."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaCapture:
    """CUDA graphs that share one memory pool: captured largest first, each fits into it."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, step: Callable[[], Left], /) -> tuple[Replayed, Left]:
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side):
            out = step()
        self._pool = self._pool or graph.pool()
        return graph, out


@dataclass(slots=True)
class _Held:
    """`moved`: bytes that come from other ranks because the cache is dealt: replays count none."""

    shape: StepGraph
    buffers: StepBuffers
    step: Step
    graph: Replayed
    out: StaticOutput
    moved: Counter[str]


class StaticSteps:
    """The captured steps of one executor. `replays`: how many steps each phase replayed; `draws`:
    how the draws of such steps were launched (`sampler.launch_draws`)."""

    def __init__(
        self, parts: LocalParts, tables: DeviceTables, capture: Capture | None = None
    ) -> None:
        self._parts, self._tables = parts, tables
        self._capture = capture or CudaCapture()
        self._held: dict[Phase, list[_Held]] = {}
        self.replays: dict[Phase, int] = {}
        self.draws = Counter[str]()

    @torch.inference_mode()
    def capture(self, shape: StepGraph) -> None:
        """Capture one bucket. Largest first saves memory: later ones fit into the first's."""
        parts, phase = self._parts, Phase(shape.phase)
        buffers = StepBuffers.make(shape, parts.device, adapters=parts.adapters > 0)
        ops, draws = parts.ops.phase(phase), self._draws(phase)
        counted, moved = parts.model.dealt.moved, Counter[str]()
        buffers.fill(np.zeros(0, np.int64), (), self._tables.spare, phase is Phase.DECODE)

        def step() -> StaticOutput:
            before = Counter(counted)
            inputs = step_inputs(shape, buffers, self._tables, parts.groups)
            hidden = parts.model.forward(inputs, parts.store.layers, ops)
            moved.clear()
            moved.update(counted - before)
            logits = parts.model.logits(hidden, inputs, ops)
            finite = None
            if phase is not Phase.DECODE:
                finite = torch.isfinite(parts.model.normed(hidden).flatten(1)).all(dim=1)
            best = ops.sample(logits, SampleInputs(greedy=True)) if draws else None
            return StaticOutput(logits, finite, best, hidden, inputs)

        graph, out = self._capture(step)
        if draws:
            out.draws = CapturedDraws(out.logits, ops.sample, self._capture)
        if parts.model_drafts is None:
            out.hidden = None  # its memory is free for the buckets to come
        listed = self._held.setdefault(phase, [])
        listed.append(_Held(shape, buffers, step, graph, out, moved))
        listed.sort(key=lambda held: (held.shape.tokens, held.shape.runs))

    @torch.inference_mode()
    def run(self, segment: Segment, table: SlotTable, *, eager: bool) -> StaticOutput | None:
        """The segment in the smallest bucket that holds it; None when none does. `eager`: its ops
        are launched one by one, on the bucket's shapes."""
        rank = segment.ranks[0]
        held = self._bucket(segment, rank)
        if held is None:
            return None
        spare, one = self._tables.spare, segment.phase is Phase.DECODE
        runs = [(run.slot, run.start, len(run.tokens)) for run in rank.runs]
        held.buffers.fill(step_ids(rank.runs, table), runs, spare, one)
        if self._parts.adapters:
            held.buffers.fill_adapters(adapter_places(rank.runs, table))
        if eager:
            return held.step()
        held.graph.replay()
        self._parts.model.dealt.moved.update(held.moved)
        self.replays[segment.phase] = self.replays.get(segment.phase, 0) + 1
        return held.out

    def holds(self, segment: Segment) -> bool:
        """Whether a bucket was captured that holds the segment."""
        return self._bucket(segment, segment.ranks[0]) is not None

    def _draws(self, phase: Phase) -> bool:
        """Whether the sampler of `phase` can be captured."""
        return any(
            choice.impl.graph_safe
            for choice in self._parts.ops.choices
            if choice.request.op == "sample" and choice.request.phase is phase
        )

    def _bucket(self, segment: Segment, rank: RankTokens) -> _Held | None:
        """Rows of every token are computed in decode and verify, elsewhere each run's last."""
        if segment.stop_layer != ALL_LAYERS:
            return None
        if segment.phase not in (Phase.DECODE, Phase.VERIFY) and any(
            run.logits > 1 for run in rank.runs
        ):
            return None
        tokens, runs = rank.tokens + rank.padding, len(rank.runs)
        return next(
            (
                held
                for held in self._held.get(segment.phase, ())
                if held.shape.tokens >= tokens and held.shape.runs >= runs
            ),
            None,
        )


def rows_of(
    out: StaticOutput, segment: Segment, counts: Counter[str]
) -> tuple[Tensor, StepDraws | None]:
    """Logits [R, V] of the rows that the segment asks for, in order, and how to draw from them."""
    runs = segment.ranks[0].runs
    if segment.phase is Phase.VERIFY:
        at, wanted = 0, list[int]()
        for run in runs:
            at += len(run.tokens)
            wanted += range(at - run.logits, at)
    else:
        at = len(runs)
        wanted = [number for number, run in enumerate(runs) if run.logits]
    if len(wanted) != at:
        return out.logits[to_device(np.array(wanted, np.int64), out.logits.device)], None
    if out.best is None or out.draws is None:
        return out.logits[:at], None
    return out.logits[:at], StepDraws(first_rows(out.best, at), out.draws, counts)
