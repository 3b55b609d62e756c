"""Cases of the experts: empty experts (NaN inside), padded rows, clamps at work, no rows; experts
as plain matrices and in every block format, with widths that do not fill a block.

Where activations are rounded, a hidden value beside the middle of two e4m3 numbers may go either
way; such inputs are drawn again, so that float32 has the truth's choice. Scales are powers of two
and e4m3 is itself a floating type, so groups show in the smallest values of a group alone: `x` has
an outlier that no weight reads, and the last channels of a wide hidden activation are tiny.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.formats.blocks import FORMATS
from metainfer.formats.quant import Stored, dequantise
from metainfer.ops.case import Case, Weight, generator, normal
from metainfer.ops.common import wide
from metainfer.ops.linear.cases import scale_mistakes, stored
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.rounding import activation_group, round_activations
from metainfer.ops.moe_experts.ref import moe_experts, moe_experts_rounded, with_shared

NAN = float("nan")
TRIES = 200
OUTLIER, LARGE = 5, 12288.0
"""A channel, and a value beside which those of its group are coarse."""
TINY = 2.0**-8


@dataclass(frozen=True, slots=True)
class Sizes:
    rows: int
    e: int
    k: int
    d: int
    f: int
    limit: float = 0.0
    idle: int = 0  # experts that nobody chooses
    padding: int = 0  # rows without an expert
    scheme: str = "F32"
    tiny: bool = True  # some channels are far smaller than others
    shared: bool = False  # with what the shared expert gives

    @property
    def name(self) -> str:
        tail = (f"-limit{self.limit:g}" if self.limit else "") + "-shared" * self.shared
        return f"{self.scheme}-{self.rows}x{self.d}x{self.f}-{self.k}of{self.e}{tail}"


SIZES = (
    Sizes(0, 4, 2, 16, 8, 10.0),
    Sizes(1, 1, 1, 1, 1),
    Sizes(5, 8, 2, 33, 17, 2.0, idle=5),
    Sizes(9, 6, 6, 24, 40, shared=True),
    Sizes(30, 7, 3, 32, 16, 1.0, idle=1, padding=4, shared=True),
    Sizes(3, 16, 6, 64, 32, 10.0, idle=8, padding=3),
    Sizes(0, 3, 2, 64, 32, 10.0, scheme="mxfp4"),
    Sizes(1, 5, 3, 128, 64, 10.0, idle=2, scheme="mxfp4"),
    Sizes(4, 4, 2, 160, 40, 1.0, idle=1, padding=1, scheme="mxfp4", shared=True),
    Sizes(2, 3, 2, 1024, 1024, 1.0, idle=1, padding=1, scheme="mxfp4", tiny=False, shared=True),
    Sizes(1, 2, 1, 512, 512, 10.0, idle=1, scheme="mxfp4"),
    Sizes(3, 3, 2, 48, 48, 10.0, scheme="nvfp4"),
    Sizes(2, 2, 1, 64, 32, scheme="nvfp4_compressed"),
    Sizes(3, 4, 2, 192, 72, 2.0, idle=1, scheme="fp8_128"),
    Sizes(2, 2, 1, 64, 160, 10.0, scheme="fp8_128"),
    Sizes(2, 3, 2, 96, 32, 10.0, scheme="fp8_32"),
    Sizes(2, 2, 2, 64, 40, 10.0, scheme="fp8_128_f32"),
)


MANY = (
    Sizes(9, 1, 1, 256, 128, 10.0, scheme="mxfp4"),
    Sizes(80, 3, 2, 512, 128, 1.0, idle=1, padding=2, scheme="mxfp4", shared=True),
)
"""More rows for an expert than its kernels of few take: one tile in part, two tiles."""


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    return [_case(g, sizes) for sizes in SIZES]


def many(seed: int) -> list[Case]:
    """In bfloat16, whose own rounding turns more values than an unsteady input does. Rows come
    rounded, too, as other ranks send them."""
    g = generator(seed)
    return [replace(_case(g, sizes, steady=False), ahead=(0, 3)) for sizes in MANY]


def _case(g: torch.Generator, s: Sizes, steady: bool = True) -> Case:
    for _ in range(TRIES):
        x, ids, weights, up, down = _drawn(g, s)
        if not steady or s.scheme not in FORMATS or _steady(x, ids, weights, up, down, s):
            break
    shared = (normal(g, s.rows, s.d),) if s.shared else ()
    return Case(
        op="moe_experts",
        name=s.name,
        args=(x, ids, weights, Weight(up, role="experts"), Weight(down, role="experts"), *shared),
        kwargs={"limit": s.limit},
        shape={"rows": s.rows, "d": s.d, "f": s.f, "e": s.e, "top_k": s.k},
        semantics=frozenset({"clamp"} if s.limit else ()),
        schemes=(s.scheme,),
    )


_Drawn = tuple[Tensor, Tensor, Tensor, tuple[Stored, ...], tuple[Stored, ...]]


def _drawn(g: torch.Generator, s: Sizes) -> _Drawn:
    """x, ids, weights and the tensors of the experts, w1 and w3 of each in turn, then w2."""
    # Few enough digits that every type holds x as it is: rounding it is then the same in all.
    x = (normal(g, s.rows, s.d, scale=3.0) * 16).round() / 16
    w13 = normal(g, s.e, 2, s.f, s.d, scale=s.d**-0.5)
    w2 = normal(g, s.e, s.d, s.f, scale=s.f**-0.5)
    busy = torch.randperm(s.e, generator=g)[: max(s.e - s.idle, s.k)]
    picks = [busy[torch.randperm(len(busy), generator=g)[: s.k]] for _ in range(s.rows)]
    ids = torch.stack(picks).int() if picks else torch.empty(0, s.k, dtype=torch.int32)
    if s.padding:
        ids[-s.padding :] = -1
    if s.scheme in FORMATS:
        x[:, OUTLIER], w13[..., OUTLIER] = LARGE, 0
    if s.scheme in FORMATS and s.tiny:
        w13[:, :, 128:] *= TINY
        w2[..., 128:] /= TINY**2
    idle = [e for e in range(s.e) if not bool((ids == e).any())]
    w13[idle], w2[idle] = NAN, NAN
    weights = torch.softmax(normal(g, s.rows, s.k), -1).float() * 1.5
    up = tuple(stored(part, s.scheme) for part in w13.flatten(0, 1))
    return x, ids, weights, up, tuple(stored(part, s.scheme) for part in w2)


def _steady(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: tuple[Stored, ...],
    down: tuple[Stored, ...],
    s: Sizes,
) -> bool:
    """No hidden value is so near a middle that float32's error would turn its rounding."""
    group = activation_group(FORMATS[s.scheme])
    rows = round_activations(x, group)
    for token, slot in (ids >= 0).nonzero().tolist():
        expert = int(ids[token, slot])
        gate, up_ = (
            dequantise(part).double() @ rows[token] for part in up[2 * expert : 2 * expert + 2]
        )
        if s.limit:
            gate, up_ = gate.clamp(max=s.limit), up_.clamp(-s.limit, s.limit)
        hidden = F.silu(gate) * up_ * weights[token, slot]
        most = torch.cat(
            [part.abs().amax().expand(len(part)) for part in torch.split(hidden, group)]
        )
        slack = 3e-7 * most + 1e-6 * hidden.abs()
        above, below = (round_activations(hidden + side * slack, group) for side in (1, -1))
        if not torch.equal(above, below):
            return False
    return True


def recipe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: Tensor | None = None,
    *,
    limit: float = 0.0,
) -> Tensor:
    """The published code: products in the dtype, float32 between, weighted and rounded for w2."""
    return with_shared(_recipe(x, ids, weights, w13, w2, limit, 0), shared)


def rounded_recipe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: Tensor | None = None,
    *,
    limit: float = 0.0,
) -> Tensor:
    """The published code on block-scaled experts: e4m3 activations, results in the dtype."""
    assert w13.format is not None
    group = activation_group(w13.format)
    return with_shared(_recipe(x, ids, weights, w13, w2, limit, group), shared)


def _recipe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    limit: float,
    group: int,
) -> Tensor:
    d, f = w13.shape[1], w2.shape[1]
    up, down = w13.data["weight"].view(-1, 2 * f, d), w2.data["weight"].view(-1, d, f)

    def product(rows: Tensor, matrix: Tensor) -> Tensor:
        if not group:
            return F.linear(rows, matrix)
        return (wide(round_activations(rows, group)) @ wide(matrix).T).to(x.dtype)

    out = torch.zeros_like(wide(x))
    for expert in sorted(set(ids.flatten().tolist())):
        if expert < 0:
            continue
        token, slot = (ids == expert).nonzero(as_tuple=True)
        weight = weights[token, slot].unsqueeze(1)
        gate, up_ = wide(product(x[token], up[expert])).chunk(2, dim=-1)
        if limit:
            gate, up_ = gate.clamp(max=limit), up_.clamp(-limit, limit)
        hidden = (F.silu(gate) * up_ * weight).to(x.dtype)
        out[token] += wide(product(hidden, down[expert]))
    return out.to(x.dtype)


CASES = {"moe_experts": cases}
FOREIGN = {"moe_experts": many}
REFERENCES = {"moe_experts": moe_experts}
RECIPES = {"moe_experts": recipe}
SCALE_MISTAKES = scale_mistakes()


def _with_up_first(w13: PackedWeight, w2: PackedWeight) -> PackedWeight:
    f, d = w2.shape[1], w13.shape[1]
    halves = w13.data["weight"].view(-1, 2, f, d).flip(1)
    return replace(w13, data={"weight": halves.reshape(w13.data["weight"].shape)})


def _up_first(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: Tensor | None = None,
    *,
    limit: float = 0.0,
) -> Tensor:
    return moe_experts(x, ids, weights, _with_up_first(w13, w2), w2, shared, limit=limit)


def _scaled_twice(
    x: Tensor, ids: Tensor, weights: Tensor, *more: Any, limit: float = 0.0
) -> Tensor:
    return moe_experts(x, ids, weights * weights.sum(-1, keepdim=True), *more, limit=limit)


MISTAKES = {
    "moe_experts": {
        "swiglu clamp": (lambda *args, limit=0.0: moe_experts(*args),),
        "gate and up swapped": (_up_first,),
        "double routed scale": (_scaled_twice,),
    }
}
ROUNDED = {"moe_experts": (moe_experts_rounded, rounded_recipe)}
