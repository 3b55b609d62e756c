"""One process, one device: the executor behind `generate`, the CPU server and a single GPU.

It is given weights and caches; `warm` runs every phase and captures the graphs, `submit` launches
one step plan, `collect` reads what came of it. Nothing is compiled or chosen after `warm`: the step
looks functions up in the plan's table.
"""

from __future__ import annotations

import gc
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from metainfer.comm.side import Turns
from metainfer.core.errors import InternalError
from metainfer.core.plan import StepGraph
from metainfer.core.request import SamplingParams
from metainfer.core.step import (
    ALL_LAYERS,
    Phase,
    RankTokens,
    RunResult,
    Segment,
    StepPlan,
    StepResult,
    TokenRun,
)
from metainfer.executor.dealt import DealtChunks
from metainfer.executor.drawing import StepDraws
from metainfer.executor.finite import FiniteTrace, Place, owners_of
from metainfer.executor.graphs import Capture, CudaCapture, StaticSteps, rows_of
from metainfer.executor.halves import halves
from metainfer.executor.inputs import build
from metainfer.executor.late import DRAFTS, OP_BY_OP, Launched, Settle, Stretch, asked
from metainfer.executor.model_drafts import ModelDrafts, propose
from metainfer.executor.prompts import PromptRanks
from metainfer.executor.protocol import NanGuard
from metainfer.executor.sampler import fail_silent, launch_draws
from metainfer.executor.slots import OpenGrammar, SlotTable
from metainfer.executor.static import DeviceTables
from metainfer.executor.transfer import to_host, wait_for
from metainfer.executor.warmup import GREEDY, Runs, WarmUp, most_mixed, named, step_of
from metainfer.kernels.table import OpTable, PhaseOps
from metainfer.kv.book.spec import GroupSpec
from metainfer.kv.store.pools import KVStore
from metainfer.models.common.inputs import SegmentInputs
from metainfer.models.common.lanes import interleave

if TYPE_CHECKING:
    from metainfer.comm.emulated_ranks import EmulatedRanks

MOST_OPEN = 2
PIECES = 2
"""Of a product whose sum goes on piece by piece: four read experts too often (ADR 0054)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParts:
    """What an executor runs on, put together by `executor.assemble`. `drafts`: most in a run.
    `graphs`: what is captured, in this order. `adapters`: how many are loaded. `prompts`: who
    computes chunks whose rows ranks share, from `prefill_from` tokens on; shorter ones come as
    mixed steps. `dealt`: what each of them reads where ranks share the cache alone. `overlap`: a
    captured step may be launched before the one ahead of it was read.
    `halves`: chunks of at least so many tokens are computed as two halves in turns; `sum_pieces`:
    others of at least so many sum products piece by piece; 0: none. `turns`: where collectives go
    meanwhile."""

    model: Any
    ops: OpTable
    store: KVStore
    groups: Sequence[GroupSpec]
    device: torch.device
    slots: int
    step_tokens: int
    max_context: int
    vocab: int
    weight_bytes: int
    graphs: tuple[StepGraph, ...] = ()
    drafts: int = 0
    model_drafts: ModelDrafts | None = None
    adapters: int = 0
    prompts: PromptRanks | None = None
    dealt: DealtChunks | None = None
    overlap: bool = False
    halves: int = 0
    sum_pieces: int = 0
    prefill_from: int = 0
    turns: Turns = field(default_factory=Turns)


class LocalExecutor:
    """Executes step plans on one device. Not thread-safe; the engine's loop owns it."""

    def __init__(self, parts: LocalParts) -> None:
        self._parts = parts
        self._slots = SlotTable(parts.groups, parts.slots, parts.max_context, parts.vocab)
        self._tables = DeviceTables(self._slots, parts.device) if parts.graphs else None
        self._static: StaticSteps | None = None
        self._op_by_op = False
        self.capture: Capture = CudaCapture()  # how steps are captured
        self._open: deque[Launched] = deque()
        self.nan_guard = NanGuard.LOGITS  # set it before `warm`
        self.emulated: EmulatedRanks | None = None  # where this is one rank without its peers

    def use_grammars(self, make: OpenGrammar) -> None:
        """From now on requests may carry a grammar; `make` gives its state as they enter."""
        self._slots.open_grammar = make

    def warm(self, on_bucket: Callable[[str], None] = lambda name: None) -> None:
        """Run every phase, capture the graphs, and run the largest steps (`warmup`).

        After this nothing is left to compile, and the largest transients have been allocated.
        """
        parts = self._parts
        if isinstance(parts.ops.trace, FiniteTrace):
            parts.ops.trace.know(owners_of(parts.model.layers, parts.store.layers))
        steps = WarmUp(
            step_tokens=parts.step_tokens,
            max_context=parts.max_context,
            slots=parts.slots,
            drafts=parts.drafts,
            mixed_tokens=self._most_mixed,
            cpu=parts.device.type == "cpu",
        )
        for phase, runs, params in steps.before():
            on_bucket(named(phase, runs, params))
            self._warm_segment(phase, runs, params)
        if self._tables is not None and self.nan_guard is not NanGuard.LAYERS:
            self._static = StaticSteps(parts, self._tables, self.capture)
            for graph in parts.graphs:
                on_bucket(f"{graph.phase} graph of {graph.tokens}")
                self._static.capture(graph)
        for phase, runs in steps.largest():
            on_bucket(named(phase, runs))
            self._warm_segment(phase, runs)

    @property
    def _most_mixed(self) -> int:
        """Tokens of the largest step that is computed as decodes are and holds prompts; 0: none."""
        parts = self._parts
        if parts.prompts is None:
            return 0 if parts.dealt is not None else parts.step_tokens
        if parts.prefill_from < 2:
            return 0
        return most_mixed(parts.prefill_from, parts.slots, parts.drafts, parts.step_tokens)

    def submit(self, plan: StepPlan) -> None:
        """Launch one plan. At most two are open.

        It is read at once where nothing may be launched behind it, and the plan ahead of it is read
        first where it `waits_for` that.

        Raises:
            InternalError: the plan contradicts what this executor holds, or three are open.
        """
        if len(self._open) >= MOST_OPEN:
            raise InternalError("three plans are open")
        if self.waits_for(plan):
            self._open[-1].result()
        launched = self._launch(plan)
        self._open.append(launched)
        if self._why_alone(plan):
            try:
                launched.result()
            except BaseException:
                self._open.pop()  # it failed at its launch: nobody collects it
                raise

    @property
    def unread(self) -> bool:
        """Whether the latest open plan is still on its way."""
        return bool(self._open) and self._open[-1].unread

    def waits_for(self, plan: StepPlan) -> str:
        """Why the latest open plan has to be read before this one is launched: where this one asks
        for more than the device knows. Empty where it does not."""
        if not self.unread:
            return ""
        runs = (run for segment in plan.segments for run in segment.ranks[0].runs)
        return self._why_alone(plan) or asked(runs, self._slots)

    def collect(self) -> StepResult:
        """The result of the oldest open plan; waits for it."""
        return self._open.popleft().result()

    def execute(self, plan: StepPlan) -> StepResult:
        """`submit` and `collect` in one call."""
        self.submit(plan)
        return self.collect()

    def _why_alone(self, plan: StepPlan) -> str:
        """Why a step neither follows one that was not read nor is followed before it was."""
        static = self._static if self._parts.overlap else None
        if static is None or not all(map(static.holds, plan.segments)):
            return OP_BY_OP
        return DRAFTS if any(segment.drafts for segment in plan.segments) else ""

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> Launched:
        launched = Launched(plan, stretch := Stretch(self._parts.device))
        self._slots.apply(plan)
        if self._tables is not None:
            self._tables.apply(plan)
        parts = self._parts
        parts.store.copy_pages(plan.copies)
        parts.store.move_states(plan.moves)
        if isinstance(parts.ops.trace, FiniteTrace):
            parts.ops.trace.start()
        launched.parts = [self._segment(segment) for segment in plan.segments]
        stretch.end()
        return launched

    @torch.inference_mode()
    def locate(self, plan: StepPlan, slot: int) -> Place | None:
        """Where the run of `slot` in the latest plan first met NaN or infinity; None: not again.

        With the guard in `LAYERS` the step itself has told. Else the run is computed once more,
        alone, without a graph and without its drafts, with a check behind every op. That writes to
        pages and states of its own only; nobody may go on with the request.
        """
        parts = self._parts
        if isinstance(parts.ops.trace, FiniteTrace):
            return parts.ops.trace.first()
        segment, run = next(
            (segment, run)
            for segment in plan.segments
            for run in segment.ranks[0].runs
            if run.slot == slot
        )
        tokens = run.tokens[: len(run.tokens) - run.drafts]
        alone = RankTokens((TokenRun(slot, run.start, tokens, 1),))
        trace = FiniteTrace()
        trace.know(owners_of(parts.model.layers, parts.store.layers))
        ops = OpTable(parts.ops.choices, trace).phase(segment.phase)
        inputs = build(alone, self._slots, parts.groups).to(parts.device)
        hidden = parts.model.forward(inputs, parts.store.layers, ops, segment.stop_layer)
        parts.model.logits(hidden, inputs, ops)
        return trace.first()

    def free_memory(self) -> int:
        """Give back what caches of the allocator hold; bytes that are free afterwards."""
        gc.collect()
        if self._parts.device.type != "cuda":
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        torch.cuda.synchronize(self._parts.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._parts.device)[0]

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Inside, captured steps run op by op, on the same shapes: the same bits."""
        self._op_by_op = True
        try:
            yield
        finally:
            self._op_by_op = False

    @property
    def draws(self) -> dict[str, int]:
        """How the draws behind captured steps were launched, and how often (`sampler`)."""
        return {} if self._static is None else dict(self._static.draws)

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes in fact held, by ledger kind; the plan's ledger predicted them."""
        return {"weights": self._parts.weight_bytes, "kv": self._parts.store.nbytes}

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes that came from other ranks because they share rows of chunks or the cache, by what
        they were."""
        parts, moved = self._parts, Counter(self._parts.model.dealt.moved)
        if parts.prompts is not None:
            moved.update(parts.prompts.moved)
        return dict(moved)

    def close(self) -> None:
        """Drop open results, graphs before the memory they point into, then weights and caches:
        another engine of this process may take their place on a card at once."""
        parts: LocalParts | None = vars(self).pop("_parts", None)
        if parts is None:
            return
        card = parts.device.type == "cuda"
        if card:
            torch.cuda.synchronize(parts.device)  # a step may be under way
        self._open.clear()
        self._static = self._tables = None
        del parts
        if card:
            gc.collect()  # what stands in cycles with a layer would keep it
            torch.cuda.empty_cache()

    def _segment(self, segment: Segment) -> Settle:
        parts, guard = self._parts, self.nan_guard is not NanGuard.OFF
        phase_ops = parts.ops.phase(segment.phase)
        if parts.prompts is not None and segment.phase is Phase.CHUNK:
            results = parts.prompts.run(segment, self._slots, phase_ops, guard=guard)
            return lambda: results
        if len(segment.ranks) != 1:
            raise InternalError(f"one rank was given {len(segment.ranks)} token lists")
        rank = segment.ranks[0]
        if self._static is not None:
            out = self._static.run(segment, self._slots, eager=self._op_by_op)
            if out is not None:
                (rows, step), finite = rows_of(out, segment, self._static.draws), out.finite
                return self._finish(segment, rows, lambda: finite, out.hidden, out.inputs, step)
        if _long(segment, parts.halves) and not segment.drafts:
            return self._halved(segment, rank, phase_ops)
        host = build(rank, self._slots, parts.groups)
        inputs = host.to(parts.device)
        if parts.dealt is not None and segment.phase is Phase.CHUNK:
            inputs = parts.dealt.over_copies(inputs, segment, self._slots)
        pieces = _long(segment, parts.sum_pieces)
        with parts.turns.in_pieces(PIECES) if pieces else nullcontext():
            hidden = parts.model.forward(inputs, parts.store.layers, phase_ops, segment.stop_layer)
        logits = parts.model.logits(hidden, inputs, phase_ops) if len(host.logit_rows) else None

        def finite_rows() -> torch.Tensor:
            return torch.isfinite(parts.model.normed(hidden).flatten(1)).all(dim=1)

        return self._finish(segment, logits, finite_rows, hidden, inputs)

    def _halved(self, segment: Segment, rank: RankTokens, ops: PhaseOps) -> Settle:
        """The halves of a segment's rows in turns: one computes beside the other's collectives."""
        parts = self._parts
        hosts = [build(half, self._slots, parts.groups) for half in halves(rank)]
        inputs = [host.to(parts.device) for host in hosts]
        layers, stop, model = parts.store.layers, segment.stop_layer, parts.model
        with parts.turns:
            found = interleave([model.lane(each, layers, ops, stop) for each in inputs])
        logits = [
            model.logits(hidden, each, ops)
            for hidden, each, host in zip(found, inputs, hosts, strict=True)
            if len(host.logit_rows)
        ]

        def finite_rows() -> torch.Tensor:
            flags = [torch.isfinite(model.normed(hidden).flatten(1)).all(dim=1) for hidden in found]
            return torch.cat(flags)

        rows = torch.cat(logits) if logits else None
        return self._finish(segment, rows, finite_rows, found[-1], inputs[-1])

    def _finish(
        self,
        segment: Segment,
        logits: torch.Tensor | None,
        finite: Callable[[], torch.Tensor | None],
        hidden: Any,
        inputs: SegmentInputs,
        step: StepDraws | None = None,
    ) -> Settle:
        """Draw, look at rows that show no logits, and let a model that drafts propose. `step`: what
        a captured step has for the draws of its rows."""
        parts, rank = self._parts, segment.ranks[0]
        runs = rank.runs
        ops, guard = parts.ops.phase(segment.phase), self.nan_guard is not NanGuard.OFF
        draws = None
        if logits is not None and len(logits):
            draws = launch_draws(logits, runs, self._slots, ops, step=step)
            late = parts.overlap and not segment.drafts
            if late and self._tables is not None and draws.drawn is not None:
                self._tables.note(runs, draws.drawn)
        silent = _silent_rows(finite, runs) if guard else None

        def settle() -> list[RunResult]:
            results = [RunResult(run.slot) for run in runs]
            if draws is not None:
                results = draws.settle(guard=guard)
            if silent is not None:
                fail_silent(silent.tolist(), runs, results)
            return results

        if parts.model_drafts is None or segment.stop_layer != ALL_LAYERS:
            return settle
        wait_for(parts.device)
        results = settle()
        propose(parts.model_drafts, hidden, inputs, rank, results, self._slots, ops)
        return lambda: results

    def _warm_segment(self, phase: Phase, runs: Runs, params: SamplingParams = GREEDY) -> None:
        """One segment of (start, length) runs whose pages are all page 0, which nobody owns."""
        parts = self._parts
        prompts = parts.prompts if phase is Phase.CHUNK else None
        plan = step_of(
            phase,
            runs,
            params,
            groups=parts.groups,
            max_context=parts.max_context,
            adapters=parts.adapters,
            proposals=parts.drafts if parts.model_drafts is not None else 0,
            lists=prompts.domains if prompts is not None else 1,
        )
        self.execute(plan)
        self._slots.apply(StepPlan(0, (), released=tuple(run.slot for run in plan.new)))


def _long(segment: Segment, least: int) -> bool:
    """Whether it computes prompts, `least` tokens or more; never with 0."""
    rank = segment.ranks[0]
    prompts = segment.phase in (Phase.CHUNK, Phase.MIXED)
    return prompts and 0 < least <= rank.tokens + rank.padding


def _silent_rows(
    finite: Callable[[], torch.Tensor | None], runs: Sequence[TokenRun]
) -> torch.Tensor | None:
    """What `fail_silent` takes, on its way to the host: `finite` gives bool [T] of the whole
    segment, one flag per token. None: the step looks at logits alone.
    """
    if all(len(run.tokens) <= run.logits for run in runs) or (found := finite()) is None:
        return None
    return to_host(found)
