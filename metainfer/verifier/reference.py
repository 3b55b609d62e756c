"""The other side: an engine of references alone, and taps that put references into another engine.

References share no kernel with what they judge. The engine of references loads its own weights in
plain matrices. A tap gives one op of a running engine its reference, with the weight it would have
read, taken from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from metainfer.core.step import Phase
from metainfer.formats.blocks import FORMATS
from metainfer.kernels.registry import Registry
from metainfer.kernels.table import Function
from metainfer.models.arch import WeightSpec
from metainfer.ops.case import DTYPES
from metainfer.ops.catalog import op_cases
from metainfer.ops.linear.packed import PackedWeight
from metainfer.verifier.probe import Call
from metainfer.verifier.subject import Running, Subject, layout_pins
from metainfer.verifier.weights import Weights

WIDE = "float64"


def references(registry: Registry) -> Registry:
    """Only references, and the layouts that they read."""
    impls = [impl for impl in registry.impls() if impl.provider == "reference"]
    wanted = {layout for impl in impls for layout in impl.requires_layout.values()}
    return Registry(impls, (registry.layout(layout) for layout in sorted(wanted)))


def reference_engine(subject: Subject, tokens: int, dtype: str) -> AbstractContextManager[Running]:
    """An engine of references in `dtype`, for one sequence of `tokens`."""
    return subject.engine(
        registry=references(subject.machine.registry),
        dtype=dtype,
        context=tokens,
        concurrency=1,
        chunk_tokens=max(tokens, 2),
        kv_bytes=None,
        page_tokens=None,
        prefix_cache=False,
        draft="off",
        parallel=None,
        ops={},
        layouts=layout_pins(subject.main.resolved),
        allow_fallback=("all",),
    )


def objection(subject: Subject) -> str:
    """Why no engine of references can be loaded beside the engine; empty when one can."""
    plan = subject.plan
    if plan.layouts[0].ranks > 1:
        return "the engine's ops run in other processes; verify the model on one rank"
    needed = plan.model.parameters * 8
    free = subject.machine.platform.memory().free
    if needed > 0.8 * free:
        return (
            f"references of {plan.model.parameters:,} parameters need {needed / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB are free; op by op the model was judged on real inputs"
        )
    return ""


@dataclass(slots=True)
class Swap:
    """Gives the ops at `sites` (None: all but draws) the functions of `choose`.

    `calls`: only these calls of a forward; None for all. `dtype`: of the weights."""

    weights: Weights
    choose: Callable[[str, bool], Function]
    rounds: Callable[[Call], bool]
    dtype: torch.dtype
    device: torch.device
    sites: Collection[str] | None = None
    calls: Collection[int] | None = None
    phases: Collection[Phase] = tuple(Phase)

    def __call__(self, call: Call, go: Function) -> Any:
        named = call.op != "sample" if self.sites is None else call.site in self.sites
        if not named or (self.calls is not None and call.number not in self.calls):
            return go(*call.args, **call.kwargs)
        uses = iter(call.weights)
        args = [
            self.weights.dense(next(uses), self.dtype, self.device)
            if isinstance(arg, PackedWeight)
            else arg
            for arg in call.args
        ]
        function = self.choose(call.op, self.rounds(call))
        return function(*args, **call.kwargs)


def reference_of(op: str, rounded: bool) -> Function:
    """The reference, with activations rounded in front of block-scaled weights or not."""
    module = op_cases(op)
    found: Function = module.ROUNDED[op][0] if rounded else module.REFERENCES[op]
    return found


def recipe_of(op: str, rounded: bool) -> Function:
    """What the checkpoint's own code does."""
    module = op_cases(op)
    found: Function = module.ROUNDED[op][1] if rounded else module.RECIPES[op]
    return found


def rounding(subject: Subject, weights: Weights) -> Callable[[Call], bool]:
    """Whether the plan's layout keeps a call's weight as stored, so that its recipe rounds the
    activations too."""

    def rounds(call: Call) -> bool:
        if not call.weights or call.op not in getattr(op_cases(call.op), "ROUNDED", {}):
            return False
        return _kept(subject, weights.spec(call.weights[0]))

    return rounds


def rounds_any(subject: Subject, weights: Weights) -> bool:
    """Whether the plan's recipe rounds any activation."""
    return any(_kept(subject, spec) for spec in weights.specs())


def _kept(subject: Subject, spec: WeightSpec) -> bool:
    layout = subject.machine.registry.layout(subject.plan.bundle[spec.role])
    return layout.nbytes is not None and subject.model.facts.scheme_of(spec.tensors[0]) in FORMATS


@dataclass(slots=True)
class Rounded:
    """In an engine of references: rounds activations where the plan's recipe does."""

    subject: Subject
    weights: Weights
    rounds: Callable[[Call], bool]

    def __call__(self, call: Call, go: Function) -> Any:
        if not self.rounds(call):
            return go(*call.args, **call.kwargs)
        scheme = self.subject.model.facts.scheme_of(self.weights.spec(call.weights[0]).tensors[0])
        args = [
            replace(arg, format=FORMATS[scheme]) if isinstance(arg, PackedWeight) else arg
            for arg in call.args
        ]
        return reference_of(call.op, True)(*args, **call.kwargs)


def swaps(
    subject: Subject,
    weights: Weights,
    choose: Callable[[str, bool], Function],
    sites: Collection[str] | None = None,
    calls: Collection[int] | None = None,
) -> Swap:
    """References or recipes in the verified engine, in its type."""
    kind = DTYPES[subject.plan.model.dtype]
    if choose is reference_of:
        kind = torch.promote_types(kind, torch.float32)
    device = subject.machine.torch_device()
    rounds = rounding(subject, weights)
    return Swap(weights, choose, rounds, kind, device, sites, calls)
