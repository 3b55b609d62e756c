"""Baselines by name: what a stock engine does on a kind of device, as holds on our own plan.

A ladder starts where such an engine stands and takes one hold away per rung, so that every gain is
a difference inside one engine: the same model, scheduler and loop. A hold is a wish that any user
could state (`Intent`), never a slower code path made for the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.plan import Plan
from metainfer.planner.layouts import talks


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One measure, and how to do without it.

    `stock`: what a stock engine does in its place, and where that is known from. `ops`: op ->
    implementation, `layouts`: role -> layout id, `settings`: field of an intent -> value: the
    hold. `of`: op -> the implementation of ours that it is the other side of; any, where none is
    named. `absent`: why the measure is no rung here, in one line; nothing is held then.
    """

    name: str
    stock: str
    ops: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    of: Mapping[str, str] = field(default_factory=dict)
    absent: str = ""


_SMALL = dict.fromkeys(("rmsnorm", "add_rmsnorm", "rope", "swiglu", "kv_write"), "torch")

_CPU = (
    Rung(
        name="weights as stored",
        stock="`transformers` decodes quantised weights to float32 when it opens a file "
        "(its GGUF loader), and multiplies with torch's library",
        ops={"linear": "onednn"},
        layouts={"weight": "onednn-f32@1"},
    ),
    Rung(
        name="attention over pages",
        stock="torch's `scaled_dot_product_attention` over gathered keys",
        ops={"attn_paged": "torch"},
    ),
    Rung(
        name="small ops, fused",
        stock="one torch operator after another for norms, rotation and activation",
        ops=_SMALL,
    ),
)

_STREAMS = ("hyper_pre", "hyper_mix_pre", "hyper_mix", "hyper_head")
_BLOCKS = dict.fromkeys((*_STREAMS, "moe_route", "moe_route_hash", "swiglu_clamp"), "torch")

_CUDA = (
    Rung(
        name="experts in FP8",
        stock="MXFP4 experts are multiplied in bfloat16, by tiles of every card: vLLM 0.26 takes "
        "Marlin on an H200, others decode them (field cases B-02, B-03)",
        ops={"moe_experts": "triton-bf16"},
    ),
    Rung(
        name="FP8 linear layers",
        stock="block-scaled FP8 weights are up-converted, or run in a generic kernel whose tiles "
        "were tuned elsewhere (B-07)",
        layouts={"weight": "dense@1"},
    ),
    Rung(
        name="sparse attention for the card",
        stock="one kernel for every card: no wgmma, no bulk copies",
        ops={"attn_sparse": "triton"},
        of={"attn_sparse": "triton-wgmma"},
    ),
    Rung(
        name="attention over pages",
        stock="torch's `scaled_dot_product_attention` over gathered keys",
        ops={"attn_paged": "torch"},
    ),
    Rung(
        name="streams and routing, fused",
        stock="one torch operator after another: day-0 support of hyper-connections and of both "
        "routings is the model's published code",
        ops=_BLOCKS,
    ),
    Rung(name="small ops, fused", stock="one torch operator after another", ops=_SMALL),
    Rung(
        name="collectives for PCIe",
        stock="NCCL with the thresholds of another machine (B-12, B-13)",
        settings={"collectives": "nccl"},
    ),
)

DAY_0: Mapping[str, tuple[Rung, ...]] = {"cpu": _CPU, "cuda": _CUDA}
"""The ``day-0 profile`` by kind of device, in the order in which its holds go."""


def climbable(rungs: Iterable[Rung], plan: Plan) -> list[Rung]:
    """The rungs with their holds cut to what `plan` has; `absent` where that is nothing.

    A hold that the plan meets of its own accord is no measure of ours.
    """
    used = {choice.impl.partition("/")[0]: choice.impl.partition("/")[2]
            for choice in plan.ops.values()}  # fmt: skip
    several = any(talks(layout) for layout in plan.layouts)
    found = []
    for rung in rungs:
        layouts = {
            role: layout
            for role, layout in rung.layouts.items()
            if plan.bundle.get(role, layout) != layout
        }
        ops = {
            op: impl
            for op, impl in rung.ops.items()
            if used.get(op, impl) != impl and rung.of.get(op, used[op]) == used[op]
        }
        if rung.layouts and not layouts:
            ops = {}
        settings = rung.settings if several else {}
        absent = rung.absent
        if not (ops or layouts or settings):
            absent = absent or "the plan does what a stock engine does, or has no such op"
        found.append(replace(rung, ops=ops, layouts=layouts, settings=settings, absent=absent))
    return found


def holding(intent: Intent, rungs: Iterable[Rung]) -> Intent:
    """`intent` with the holds of `rungs`; what the user pinned stays."""
    ops, layouts = dict(intent.ops), dict(intent.layouts)
    settings: dict[str, Any] = {}
    for rung in rungs:
        ops = {**rung.ops, **ops}
        layouts = {**rung.layouts, **layouts}
        settings |= rung.settings
    origins = dict(intent.origins)
    for name in ("ops", "layouts", *settings):
        origins.setdefault(name, Origin.DERIVED)
    return replace(intent, ops=ops, layouts=layouts, origins=origins, **settings)
