"""Experts, one after the other, on the tokens that chose them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from metainfer.ops.activation.ref import swiglu_clamp
from metainfer.ops.common import wide
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.rounding import activation_group, round_activations
from metainfer.ops.moe_experts.rounded import Rows, as_read


def moe_experts(
    x: Rows,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: Tensor | None = None,
    *,
    limit: float = 0.0,
) -> Tensor:
    """``sum_k w2[e] (weights_k * h_e(x))``, e = ids_k: [T, D] in x's dtype.

    x [T, D], or the same as `Rounded`; ids [T, k] int32, -1 for none; weights [T, k] float32; w13
    ``experts-dense@1`` [E 2F, D], gate rows of an expert before its up rows; w2 [E D, F]. Experts
    without a token are not touched. `shared` [T, D], what the shared expert gives, is added to the
    rounded sum.
    """
    return with_shared(_experts(x, ids, weights, w13, w2, limit, lambda rows: rows), shared)


def moe_experts_rounded(
    x: Rows,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: Tensor | None = None,
    *,
    limit: float = 0.0,
) -> Tensor:
    """`moe_experts` as the checkpoint's recipe computes it: what enters a product is rounded to
    e4m3 first, x and the weighted hidden activation alike."""
    assert w13.format is not None
    group = activation_group(w13.format)
    routed = _experts(x, ids, weights, w13, w2, limit, lambda rows: round_activations(rows, group))
    return with_shared(routed, shared)


def with_shared(routed: Tensor, shared: Tensor | None) -> Tensor:
    """``routed + shared`` in their dtype, or `routed` where there is none."""
    return routed if shared is None else routed + shared


def _experts(
    x: Rows,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    limit: float,
    entering: Callable[[Tensor], Tensor],
) -> Tensor:
    d, f = w13.shape[1], w2.shape[1]
    up_rows = w13.data["weight"].view(-1, 2 * f, d)  # [E, 2F, D]
    down_rows = w2.data["weight"].view(-1, d, f)  # [E, D, F]
    rows = entering(wide(as_read(x)))
    out = torch.zeros_like(rows)
    for expert in range(up_rows.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        hidden = swiglu_clamp(rows[token] @ wide(up_rows[expert]).T, limit)
        hidden = entering(hidden * weights[token, slot].to(rows.dtype).unsqueeze(1))
        out.index_add_(0, token, hidden @ wide(down_rows[expert]).T)
    return out.to(x.dtype)
