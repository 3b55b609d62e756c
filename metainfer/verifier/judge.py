"""Calls of the running model against their references: real inputs, weights as loaded.

A tap judges each call where it happens. Caches are cut to the pages that the call touches, so that
what is compared is small however large the pool is. Weights come from the checkpoint, apart from
the engine. Whole-number choices (routers, selections, draws) are left to the ops' cases: on real
inputs a near tie may fall either way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from metainfer.core.step import Phase
from metainfer.kernels.table import Function
from metainfer.kv.store.entries import EntryPages, StateRows
from metainfer.ops.case import Case
from metainfer.ops.case_caches import Single
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.mistakes import Mistakes, name
from metainfer.ops.qualify import Outcome, judge
from metainfer.verifier.probe import Call
from metainfer.verifier.weights import Weights

MOST_ELEMENTS = 1 << 27
"""Larger matrices are judged by their ops' cases alone."""
ROWS = 4
"""Rows of every product that are compared, so that every layer's weights are seen."""
CHOICES = ("moe_route", "moe_route_hash", "index_select", "index_query", "sample")
BY_ROW = ("linear", "linear_f32", "embed")

#: Places of caches among an op's arguments: (cache, what points into it, how).
CACHES: Mapping[str, tuple[tuple[int, int, str], ...]] = {
    "kv_write": ((2, 4, "slots"), (3, 4, "slots")),
    "attn_paged": ((1, 3, "table"), (2, 3, "table")),
    "attn_sparse": ((1, 2, "table"), (3, 4, "table")),
    "latent_qkv": ((5, 6, "slots"),),
    "compress": ((5, 6, "lines"), (7, 8, "slots")),
    "compress_index": ((5, 6, "lines"), (7, 8, "slots")),
}
WRITTEN: Mapping[str, tuple[int, ...]] = {
    "kv_write": (2, 3),
    "latent_qkv": (5,),
    "compress": (5, 7),
    "compress_index": (5, 7),
}
#: Activations that stay float32 in a model of half precision.
SINGLE: Mapping[str, tuple[int, ...]] = {"compress": (0, 1), "compress_index": (0, 1)}


@dataclass(slots=True)
class Found:
    """What the calls at one (site, phase) gave. `worst`: error and limit of the one nearest to its
    limit. `named`: of the first that failed."""

    op: str
    impl: str
    calls: int = 0
    failed: list[str] = field(default_factory=list)
    named: tuple[str, ...] = ()
    worst: tuple[float, float] = (0.0, 1.0)


@dataclass(slots=True)
class Judge:
    """The tap. `every`: sites with a weight are judged at every call on a few rows, others at
    their first call of each phase and length. `heads`: mistakes that only the whole model can
    make, at the site of the output head."""

    weights: Weights
    dtype: str
    device: torch.device
    head: str
    heads: Mistakes = field(default_factory=dict)
    found: dict[tuple[str, Phase], Found] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __call__(self, call: Call, go: Function) -> Any:
        if call.op in CHOICES or not self._wanted(call):
            return go(*call.args, **call.kwargs)
        found = self.found.setdefault((call.site, call.phase), Found(call.op, call.impl))
        before = cut(call)
        result = go(*call.args, **call.kwargs)
        after = cut(call) if call.op in WRITTEN else before
        self._judge(call, before, after, result, found)
        return result

    def _wanted(self, call: Call) -> bool:
        for use in call.weights:
            spec = self.weights.spec(use)
            if spec.elements > MOST_ELEMENTS:
                self.skipped[call.site] = f"{spec.elements:,} elements: judged by its cases alone"
                return False
        seen = self.found.get((call.site, call.phase))
        every = call.op in BY_ROW and call.phase is Phase.CHUNK
        return every or seen is None or seen.calls < 2

    def _judge(
        self,
        call: Call,
        before: tuple[Any, ...],
        after: tuple[Any, ...],
        result: Any,
        found: Found,
    ) -> None:
        case = self._case(call, before)
        written = tuple(after[index] for index in case.outputs)
        mine = (written if result is None else (result, *written)) if written else result
        if call.op in BY_ROW:
            mine = result[: case.args[0].shape[0]]
        outcome = judge(case, case.args, mine, after, self.dtype, self.device)
        found.calls += 1
        if outcome.error is not None and outcome.allowed is not None:
            pairs = zip(outcome.error, outcome.allowed, strict=True)
            nearest = max(pairs, key=lambda pair: pair[0] / pair[1])
            if nearest[0] / nearest[1] > found.worst[0] / found.worst[1]:
                found.worst = nearest
        if not outcome.verdict.accepted:
            found.failed.append(where(call))
            found.named = found.named or self._name(call, outcome)

    def _case(self, call: Call, before: tuple[Any, ...]) -> Case:
        args: list[Any] = []
        uses = iter(call.weights)
        for place, arg in enumerate(before):
            if isinstance(arg, PackedWeight):
                args.append(self.weights.as_case(next(uses)))
            elif place in SINGLE.get(call.op, ()):
                args.append(Single(arg.detach()))
            else:
                args.append(_host(arg))
        if call.op in BY_ROW:
            args[0] = args[0][:ROWS]
        rows = None
        if call.op == "attn_paged":
            rows = int(before[4][-1])
        elif call.op == "attn_sparse":
            rows = int(before[9][-1])
        return Case(
            op=call.op,
            name=where(call),
            args=tuple(args),
            kwargs=call.kwargs,
            outputs=WRITTEN.get(call.op, ()),
            rows=rows,
            exact=call.op == "kv_write",
        )

    def _name(self, call: Call, outcome: Outcome) -> tuple[str, ...]:
        return name([outcome], self.dtype, self.heads if call.site == self.head else None)


def where(call: Call) -> str:
    """``attn_paged@decode, layer call 2``."""
    return f"{call.site}@{call.phase.value}, call {call.number + 1}"


def cut(call: Call) -> tuple[Any, ...]:
    """The arguments of a call with its caches cut to what it touches, as they are now."""
    args = list(call.args)
    for cache, pointer, how in CACHES.get(call.op, ()):
        if args[cache] is None or args[pointer] is None:
            continue
        args[cache], moved = _part(call.args[cache], call.args[pointer], how)
        args[pointer] = moved
    return tuple(args)


def _part(cache: Any, pointer: Tensor, how: str) -> tuple[Any, Tensor]:
    """The places of `cache` that `pointer` names, and `pointer` into these."""
    whole = cache if isinstance(cache, Tensor) else cache.data
    if how == "slots":
        span = cache.entries if isinstance(cache, EntryPages) else whole.shape[1]
        places = torch.where(pointer < 0, -1, pointer // span)
    else:
        places = pointer.long()
    used: Tensor = torch.unique(places[places >= 0])
    index = torch.searchsorted(used, places.clamp_min(0)).clamp_max(max(len(used) - 1, 0))
    index = torch.where(places < 0, -1, index)
    kept = whole[used] if len(used) else whole[:1].clone()
    moved = torch.where(pointer < 0, -1, index * span + pointer % span) if how == "slots" else index
    part = kept if isinstance(cache, Tensor) else dataclasses.replace(cache, data=kept)
    return part, moved.to(pointer.dtype)


def _host(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.detach().cpu()
    if isinstance(arg, EntryPages | StateRows):
        return dataclasses.replace(arg, data=arg.data.cpu())
    return arg
