"""`tune capacity`: what steps need beside weights and caches here, as a record that plans split by.

The engine serves one prompt as long as the plan promises, or as much of it as the time allows, and
as many short answers at once as may run. Every step is measured: a chunk that ends at n tokens has
the peak of that length. Beside the record the ledger is held against the device, item by item.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from metainfer.bench.alone import check_alone
from metainfer.bench.conditions import conditions
from metainfer.bench.offline import drawn_prompts
from metainfer.core.errors import InternalError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.plan import Limits, StepGraph
from metainfer.core.records import Record
from metainfer.core.request import Request, SamplingParams
from metainfer.core.step import Segment, StepPlan
from metainfer.engine.engine import Engine
from metainfer.engine.machine import Machine, open_machine
from metainfer.planner import graphs, needs
from metainfer.planner.needs import Needs, Peak
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved

if TYPE_CHECKING:
    import torch

Log = Callable[[str], None]

ANSWER = 2
SHORT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions:
    """`seconds`: how long the long prompt may run. `keep`: write the record."""

    seconds: float = 120.0
    seed: int = 0
    keep: bool = True


def run(
    intent: Intent,
    options: CapacityOptions,
    log: Log,
    machine: Machine | None = None,
) -> dict[str, object]:
    """Measure, keep: ``{"needs", "key", "kept", "promised", "reached", "items", "device",
    "conditions"}``.

    `promised`: tokens of the longest context that a step may meet, `reached`: that one did meet.
    `items`: planned and measured bytes of each kind. `device`: bytes of a card, in use at the end
    of all steps, planned for, and the difference as a share of it; None where it does not tell.
    `machine`: instead of this one.

    Raises:
        RefusedError: the plan has several ranks.
    """
    machine = machine or open_machine(intent.platform)
    check_alone(machine.resolve(open_model(intent.model), intent))  # before anything is loaded
    origins = {**intent.origins, "prefix_cache": Origin.DERIVED}
    apart = replace(intent, prefix_cache=False, origins=origins)
    with closing(Engine(apart, lambda progress: None, machine=machine)) as engine:
        info = engine.start()
        resolved = engine.resolved
        if resolved is None:
            raise InternalError("the engine has not started")
        plan, here = resolved.plan, resolved.chosen.held
        assert here is not None  # it runs
        device = machine.torch_device()
        before = _DeviceMemory.read(device)
        found = _peaks(engine, device, info.vocab_size, options, log)
        after = _DeviceMemory.read(device)
        held = engine.held_bytes
    reached = max(peak.context for peak in found)
    told = conditions(plan) | {"seconds": options.seconds}
    kept = Needs(
        peaks=tuple(found),
        ops=needs.ops_of(resolved.selection.bundle),
        outside_bytes=after.outside,
        slack_bytes=after.slack(before, max(peak.bytes for peak in found)),
        standing_bytes=before.beside(held),
        captured=graphs.key(here.wanted, plan.limits.max_context, plan.shared_beside),
        origin=f"tune capacity, {told['time']}, {len(found)} steps up to {reached:,} tokens",
    )
    key = needs.needs_key(resolved.arch, plan.model.dtype, plan.bundle, plan.threads)
    if options.keep:
        machine.store.put(Record(needs.KIND, key, kept.to_json(), told))
    promised = needs.longest_seen(plan.limits)
    wanted = kept.transient_bytes(plan.limits.step_tokens, promised)
    return {
        "needs": kept.to_json(),
        "key": key,
        "kept": options.keep,
        "promised": promised,
        "reached": reached,
        "items": _items(resolved, held, wanted, kept),
        "device": _on_device(resolved, after),
        "conditions": told,
    }


class _Turns:
    """The engine's turns, and the step plan of each; None where a turn computed nothing."""

    def __init__(self, engine: Engine, limits: Limits, vocab: int) -> None:
        self._engine, self._limits, self._vocab = engine, limits, vocab
        self.plans: list[StepPlan | None] = []

    def __call__(self) -> None:
        self.plans.append(None)
        self._engine.step()

    def note(self, plan: StepPlan, seconds: float) -> None:
        self.plans[-1] = plan

    def run(self, options: CapacityOptions, log: Log) -> Iterator[Callable[[], None]]:
        """Many short answers, then the long prompt; each yield is to be called once."""
        engine, limits = self._engine, self._limits
        short = min(SHORT, limits.max_context - ANSWER)
        count = limits.max_running if short > 0 else 0
        for number, prompt in enumerate(drawn_prompts(count, short, self._vocab, options.seed)):
            _submit(engine, f"short-{number}", prompt)
        yield from self._until(math.inf)
        tokens = max(1, limits.max_context - ANSWER)
        log(f"a prompt of {tokens:,} tokens, for at most {options.seconds:g} s")
        _submit(engine, "long", *drawn_prompts(1, tokens, self._vocab, options.seed + 1))
        yield from self._until(time.monotonic() + options.seconds)
        engine.cancel(["long"])

    def _until(self, end: float) -> Iterator[Callable[[], None]]:
        while self._engine.has_work and time.monotonic() < end:
            yield self


def _peaks(
    engine: Engine, device: torch.device, vocab: int, options: CapacityOptions, log: Log
) -> list[Peak]:
    """One for each kind of step; the highest where several are alike. What a captured step takes
    is the graphs' and says nothing about chunks: it counts where nothing else ran."""
    from metainfer.executor.peaks import peaks

    resolved = engine.resolved
    assert resolved is not None
    turns = _Turns(engine, resolved.plan.limits, vocab)
    engine.on_step = turns.note
    measured = peaks(device, turns.run(options, log))
    engine.on_step = None
    found: dict[tuple[int, int], int] = {}
    replayed: dict[tuple[int, int], int] = {}
    graphs = resolved.plan.graphs
    for plan, most in zip(turns.plans, measured, strict=True):
        segments = plan.segments if plan is not None else ()
        kept = replayed if all(_captured(segment, graphs) for segment in segments) else found
        runs = [run for segment in segments for rank in segment.ranks for run in rank.runs]
        if runs:
            kind = (sum(len(run.tokens) for run in runs), max(run.end for run in runs))
            kept[kind] = max(kept.get(kind, 0), most)
    told = sorted((found or replayed).items())
    return [Peak(rows, context, most) for (rows, context), most in told]


def _captured(segment: Segment, graphs: Sequence[StepGraph]) -> bool:
    runs = sum(len(rank.runs) for rank in segment.ranks)
    tokens = sum(len(run.tokens) for rank in segment.ranks for run in rank.runs)
    return any(
        graph.phase == segment.phase.value and tokens <= graph.tokens and runs <= graph.runs
        for graph in graphs
    )


def _submit(engine: Engine, name: str, prompt: Sequence[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    engine.submit(Request(name, tuple(prompt), params))


@dataclass(frozen=True, slots=True)
class _DeviceMemory:
    """Bytes in use by the allocator, kept by it, and outside of it; None on a device that does not
    tell."""

    allocated: int | None = None
    reserved: int | None = None
    outside: int | None = None
    whole: int | None = None

    @staticmethod
    def read(device: torch.device) -> _DeviceMemory:
        import torch

        if device.type != "cuda":
            return _DeviceMemory()
        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        outside = whole - free - reserved
        return _DeviceMemory(torch.cuda.memory_allocated(), reserved, outside, whole)

    def beside(self, held: dict[str, int]) -> int | None:
        """What is in use and neither weights nor cache."""
        return None if self.allocated is None else max(0, self.allocated - sum(held.values()))

    def slack(self, before: _DeviceMemory, highest: int) -> int | None:
        """What the allocator keeps beyond what was in use at the highest peak over `before`."""
        if self.reserved is None or before.allocated is None:
            return None
        return max(0, self.reserved - before.allocated - highest)


def _items(
    resolved: Resolved, held: dict[str, int], transient: int, kept: Needs
) -> list[dict[str, object]]:
    """Planned against measured bytes of each kind in the ledger."""
    planned: dict[str, int] = {}
    for row in resolved.plan.ledger:
        if row.memory == "device":
            planned[row.kind] = planned.get(row.kind, 0) + row.bytes
    measured: dict[str, int] = {**held, "transient": transient}
    if kept.standing_bytes is not None:
        measured["graphs"] = kept.standing_bytes
    if kept.reserve_bytes is not None:
        measured["reserve"] = kept.reserve_bytes
    return [
        {
            "item": kind,
            "planned_bytes": planned.get(kind, 0),
            "measured_bytes": measured.get(kind),
            "difference": _difference(planned.get(kind, 0), measured.get(kind)),
        }
        for kind in dict.fromkeys((*measured, *planned))
        if kind != "free"
    ]


def _on_device(resolved: Resolved, after: _DeviceMemory) -> dict[str, object]:
    """What is in use of a card after all steps, beside what the ledger gives away of it."""
    rows = [row for row in resolved.plan.ledger if row.memory == "device" and row.kind != "free"]
    planned, used = sum(row.bytes for row in rows), None
    if after.reserved is not None and after.outside is not None:
        used = after.reserved + after.outside
    off = None if used is None or not after.whole else (used - planned) / after.whole
    return {"bytes": after.whole, "used": used, "planned": planned, "unexplained": off}


def _difference(planned: int, measured: int | None) -> float | None:
    """Relative to what was measured; None where nothing was, or nothing is there."""
    return None if not measured else planned / measured - 1
