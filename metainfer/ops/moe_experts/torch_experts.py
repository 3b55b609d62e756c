"""Experts on the tokens that chose them: one sort, then two products for each expert touched.

Few tokens (a decode step) cost little more than the products: an expert that nobody chose is
neither read nor decoded, and the host knows the counts after one wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.activation.torch_swiglu import swiglu_clamp
from metainfer.ops.common import wide
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.rounding import activation_group, round_activations
from metainfer.ops.linear.stored import part
from metainfer.ops.moe_experts.rounded import Rounded, Rows, as_read, rounded_rows

Product = Callable[[Tensor, int], Tensor]


def dense(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: Tensor | None = None,
    *,
    limit: float = 0.0,
) -> Tensor:
    """See `ref.moe_experts`; ``experts-dense@1``. Products are the library's in x's dtype."""
    d, f = w13.shape[1], w2.shape[1]
    up_rows = w13.data["weight"].view(-1, 2 * f, d)  # [E, 2F, D]
    down_rows = w2.data["weight"].view(-1, d, f)  # [E, D, F]

    def up(rows: Tensor, expert: int) -> Tensor:
        return wide(F.linear(rows, up_rows[expert]))

    def down(hidden: Tensor, expert: int) -> Tensor:
        return wide(F.linear(hidden.to(x.dtype), down_rows[expert]))

    return _joined(_experts(x, x, ids, weights, up, down, limit), shared)


def static(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: Tensor | None = None,
    *,
    limit: float = 0.0,
) -> Tensor:
    """`dense` for a captured step: every expert runs on every token, and the host asks nothing."""
    d, f = w13.shape[1], w2.shape[1]
    out = torch.zeros_like(wide(x))
    pairs = zip(
        w13.data["weight"].view(-1, 2 * f, d), w2.data["weight"].view(-1, d, f), strict=True
    )
    for expert, (up, down) in enumerate(pairs):
        chosen = ids == expert  # [T, k]
        each = torch.where(chosen, weights.to(out.dtype), 0.0).sum(dim=1, keepdim=True)
        hidden = swiglu_clamp(wide(F.linear(x, up)), limit).mul_(each)
        found = wide(F.linear(hidden.to(x.dtype), down))
        out += found.masked_fill_(~chosen.any(dim=1, keepdim=True), 0.0)
    return _joined(out.to(x.dtype), shared)


def recipe(
    x: Rows,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: Tensor | None = None,
    *,
    limit: float = 0.0,
) -> Tensor:
    """See `ref.moe_experts_rounded`; ``experts-stored@1``. float32 (float64) throughout, but for
    what is rounded to e4m3 before a product."""
    x, group = as_read(x), _group(w13)
    kind = wide(x).dtype

    def up(rows: Tensor, expert: int) -> Tensor:
        each = (rows @ part(w13, 2 * expert + half).to(kind).T for half in (0, 1))
        return torch.cat(tuple(each), dim=1)

    def down(hidden: Tensor, expert: int) -> Tensor:
        return round_activations(hidden, group) @ part(w2, expert).to(kind).T

    entering = round_activations(wide(x), group)
    return _joined(_experts(x, entering, ids, weights, up, down, limit), shared)


def rounded(x: Tensor, w13: PackedWeight) -> Rounded:
    """What `recipe` does to x [T, D] first, for ranks that send it."""
    return rounded_rows(x, _group(w13))


def _group(w13: PackedWeight) -> int:
    assert w13.format is not None
    return activation_group(w13.format)


def _joined(routed: Tensor, shared: Tensor | None) -> Tensor:
    return routed if shared is None else routed.add_(shared)


def _experts(
    x: Tensor,
    entering: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Product,
    down: Product,
    limit: float,
) -> Tensor:
    """`entering`: x as the first product reads it, [T, D]."""
    out = torch.zeros_like(wide(x))
    chosen, order = torch.sort(ids.flatten(), stable=True)
    token = order.div(ids.shape[1], rounding_mode="floor")
    each = weights.flatten()[order].to(out.dtype).unsqueeze(1)  # [T k, 1]
    found, counts = torch.unique_consecutive(chosen, return_counts=True)
    first = 0
    for expert, count in zip(found.tolist(), counts.tolist(), strict=True):
        last = first + count
        if expert >= 0:
            at = token[first:last]
            hidden = swiglu_clamp(up(entering[at], expert), limit)
            out.index_add_(0, at, down(hidden.mul_(each[first:last]), expert))
        first = last
    return out.to(x.dtype)
