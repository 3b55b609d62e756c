"""`tune kernels`: how a plan's kernels are launched best here: verified, then timed, then kept.

Shapes are the plan's. What does not fit a block's shared memory is never compiled; the rest must
pass a case of the very shape before it is timed (law 4). Candidates are timed in turns, on a card
inside graphs; medians with their spread decide, and a tie leaves a kernel as it is.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from metainfer.bench.conditions import conditions
from metainfer.core.errors import UsageError
from metainfer.core.intent import Intent
from metainfer.core.verdict import Reason
from metainfer.engine.machine import Machine, open_machine, source_digest
from metainfer.kernels import tuning
from metainfer.kernels.impl import Context, Impl, OpRequest, Setting
from metainfer.kernels.select_op import objections
from metainfer.kernels.tuning import Entry
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved

Log = Callable[[str], None]
Call = Callable[[], object]

VERIFIED_ROWS = 160
"""Most rows of the case that a candidate must pass: more than any form for few rows serves."""

SAMPLE_S = 1e-3
"""Least seconds of one sample on a host: shorter calls are repeated in it."""

GRAPH_CALLS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """`rounds`: samples of each candidate. `keep`: write records. `ops`: only these, or all."""

    rounds: int = 15
    seed: int = 0
    keep: bool = True
    ops: tuple[str, ...] = ()


@dataclass(slots=True)
class Tried:
    """One setting of one implementation. `default`: what it does by itself. `samples`: seconds of a
    call; empty where `reasons` tell why it was not timed."""

    impl: Impl
    setting: Setting
    default: bool
    reasons: tuple[Reason, ...] = ()
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def mad(self) -> float:
        middle = self.median
        return statistics.median(abs(sample - middle) for sample in self.samples)

    def row(self) -> dict[str, object]:
        found: dict[str, object] = {"impl": self.impl.id, "setting": dict(self.setting.values)}
        if not self.samples:
            return {**found, "reasons": [reason.to_json() for reason in self.reasons]}
        return {**found, "median": self.median, "mad": self.mad, "n": len(self.samples)}


Timer = Callable[[Call, Tried], Callable[[], float]]
"""Makes of a call what takes one sample: seconds of one call."""


def run(
    intent: Intent,
    options: KernelOptions,
    log: Log,
    machine: Machine | None = None,
    timer: Timer | None = None,
) -> dict[str, object]:
    """Tune, keep: ``{"card", "tuned": [...], "skipped": [...], "conditions"}``.

    Each of `tuned` names site, phase and shape, every candidate with its numbers or the reasons
    against it, and of each implementation the setting that is kept.

    Raises:
        UsageError: the plan has no such op.
        UsageError, RefusedError: as `planner.resolve.resolve`.
    """
    machine = machine or open_machine(intent.platform)
    model = open_model(intent.model, adapters=intent.adapters)
    resolved = machine.resolve(model, intent)
    _known(resolved, options.ops)
    card = tuning.card_class(machine.facts)
    under = conditions(resolved.plan)
    timer = timer or (_on_card if machine.facts.device.kind == "cuda" else _on_host)
    tuned: list[dict[str, object]] = []
    skipped: list[dict[str, object]] = []
    for request in _requests(resolved, options.ops):
        where = {"site": request.site, "phase": request.phase.value, "shape": dict(request.shape)}
        impls = [impl for impl in _eligible(machine, resolved, request) if impl.settings]
        if not impls:
            continue
        if _shaped(request) is None:
            text = f"no case of {request.op} can be made in a shape of its own"
            skipped.append({**where, "reason": text})
            continue
        log(f"{request.site} in {request.phase.value}, {_text(request.shape)}")
        tried = [
            t for impl in impls for t in _candidates(machine, impl, resolved, request, options)
        ]
        _time(machine, request, tried, options, timer)
        kept = [_entry(request, best) for impl in impls if (best := _best(impl, tried))]
        if options.keep:
            for entry in kept:
                machine.store.of(card).put(tuning.record(entry, under))
        found = [{"impl": e.impl, "setting": dict(e.values), "seconds": e.seconds} for e in kept]
        tuned.append({**where, "candidates": [t.row() for t in tried], "kept": found})
    machine.forget_tunings()
    return {"card": dict(card.facts), "tuned": tuned, "skipped": skipped, "conditions": under}


def _known(resolved: Resolved, ops: Sequence[str]) -> None:
    there = sorted({choice.request.op for choice in resolved.selection.bundle.choices})
    unknown = [op for op in ops if op not in there]
    if unknown:
        raise UsageError(
            f"this plan has no op {', '.join(map(repr, unknown))}.", f"It has: {', '.join(there)}."
        )


def _requests(resolved: Resolved, ops: Sequence[str]) -> Iterator[OpRequest]:
    """The plan's requests, each shape once."""
    seen = set()
    for choice in resolved.selection.bundle.choices:
        request = choice.request
        key = (request.op, request.phase, tuple(sorted(request.shape.items())), request.schemes)
        if key not in seen and (not ops or request.op in ops):
            seen.add(key)
            yield request


def _eligible(machine: Machine, resolved: Resolved, request: OpRequest) -> list[Impl]:
    """What could run there in the plan's bundle, references aside."""
    context = Context(request, machine.facts, resolved.selection.bundle.layouts)
    return [
        impl
        for impl in machine.registry.of(request.op)
        if impl.provider != "reference" and objections(impl, context).accepted
    ]


def _shaped(request: OpRequest) -> Callable[[OpRequest, int, int], Any] | None:
    from metainfer.ops.catalog import op_cases

    found: Mapping[str, Any] = getattr(op_cases(request.op), "SHAPED", {})
    return found.get(request.op)


def _candidates(
    machine: Machine, impl: Impl, resolved: Resolved, request: OpRequest, options: KernelOptions
) -> Iterator[Tried]:
    """Every setting: pruned by shared memory, then verified."""
    from metainfer.ops.qualify import run_case

    make = _shaped(request)
    assert make is not None and impl.settings is not None
    context = Context(request, machine.facts, resolved.selection.bundle.layouts)
    settings = impl.settings(context)
    kept, refused = tuning.fitting(settings, machine.facts.device.shared_bytes_per_block)
    for setting, reason in zip([s for s in settings if s not in kept], refused, strict=True):
        yield Tried(impl, setting, setting == settings[0], (reason,))
    case = make(request, min(request.shape["rows"], VERIFIED_ROWS), options.seed)
    for setting in kept:
        outcome = run_case(
            impl, case, request.dtype, machine.torch_device(), machine.registry, setting.values
        )
        yield Tried(impl, setting, setting == settings[0], outcome.verdict.reasons)


def _time(
    machine: Machine,
    request: OpRequest,
    tried: Sequence[Tried],
    options: KernelOptions,
    timer: Timer,
) -> None:
    """Samples of all candidates that passed, in turns whose order is drawn anew each round."""
    from metainfer.ops.qualify import given_args

    make, device = _shaped(request), machine.torch_device()
    assert make is not None
    case = make(request, request.shape["rows"], options.seed + 1)
    given: dict[str, tuple[Any, ...]] = {}
    sampled: list[tuple[Tried, Callable[[], float]]] = []
    for each in tried:
        if each.reasons:
            continue
        impl = each.impl
        if impl.id not in given:
            given[impl.id] = given_args(impl, case, request.dtype, device, machine.registry)
        function: Any = impl.resolve()
        call = partial(function, *given[impl.id], **case.kwargs, **each.setting.values)
        sampled.append((each, timer(call, each)))
    order = random.Random(options.seed)
    for _ in range(options.rounds):
        order.shuffle(sampled)
        for each, sample in sampled:
            each.samples.append(sample())


def _best(impl: Impl, tried: Sequence[Tried]) -> Tried | None:
    """The fastest setting; the first one unless another is faster beyond both spreads."""
    timed = [each for each in tried if each.impl is impl and each.samples]
    if not timed:
        return None
    best = min(timed, key=lambda each: each.median)
    own = next((each for each in timed if each.default), None)
    if own is not None and best.median + best.mad >= own.median - own.mad:
        return own
    return best


def _entry(request: OpRequest, best: Tried) -> Entry:
    return Entry(
        impl=best.impl.id,
        dtype=request.dtype,
        phase=request.phase.value,
        shape=request.shape,
        values=best.setting.values,
        seconds=best.median,
        source=source_digest(best.impl),
    )


def _on_host(call: Call, tried: Tried) -> Callable[[], float]:
    """Calls repeated until a sample is long enough to be told."""
    call()
    begin = time.perf_counter()
    call()
    repeats = max(1, int(SAMPLE_S / max(time.perf_counter() - begin, 1e-7)))

    def sample() -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats

    return sample


def _on_card(call: Call, tried: Tried) -> Callable[[], float]:
    """A graph of calls, replayed between two events."""
    import torch

    from metainfer.executor.graphs import CudaCapture

    def step() -> Any:
        for _ in range(GRAPH_CALLS):
            call()

    graph, _ = CudaCapture()(step)
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)

    def sample() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / GRAPH_CALLS

    return sample


def _text(shape: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(shape.items()))
