"""The lightning indexer: rotated and rounded queries and keys, scores, an exact top-k set."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metainfer.ops.common import rotate_tail, wide
from metainfer.ops.compress.ref import visible_entries

GROUP = 32
LARGEST = 6.0
AMAX_FLOOR = 6.0 * 2.0**-126
#: Borders between neighbours of 0, .5, 1, 1.5, 2, 3, 4, 6.
_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def index_rotate(
    x: Tensor, positions: Tensor | None, cos_sin: Tensor | None, *, fp4: bool
) -> Tensor:
    """Rope on the tail (with positions [T] and cos_sin [M, R]), Hadamard, e2m1: x [T, H, d].

    d is a power of two. One rounding to x's dtype, at the end.
    """
    h = wide(x)
    if positions is not None and cos_sin is not None:
        h = rotate_tail(h, cos_sin[positions].unsqueeze(1))
    h = hadamard(h)
    return (e2m1(h) if fp4 else h).to(x.dtype)


def index_select(
    q: Tensor,
    g: Tensor,
    keys: Tensor,
    slots: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    ratio: int,
    top_k: int,
    scale: float,
) -> Tensor:
    """The `top_k` best visible entries of each query, rising, then -1: [T, top_k] int32.

    q [T, H, d]; g [T, H]; keys [B, W, d]; slots [S] int64; query_start [S + 1], context_lens [S]
    int32, tokens placed as in `attn_paged`.
    """
    out = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    starts = query_start.tolist()
    for s, (slot, context) in enumerate(zip(slots.tolist(), context_lens.tolist(), strict=True)):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        total = context // ratio
        own = torch.arange(context - (end - begin), context, device=q.device)
        seen = visible_entries(own, ratio).unsqueeze(1)  # [n, 1]
        value = scores(q[begin:end], g[begin:end], keys[slot, :total], scale)
        hidden = torch.arange(total, device=q.device) >= seen
        value = value.masked_fill(hidden, float("-inf"))
        order = torch.sort(value, dim=-1, descending=True, stable=True).indices[:, :top_k]
        kept = order.masked_fill(torch.arange(order.shape[1], device=q.device) >= seen, total)
        kept = kept.sort(dim=-1).values
        out[begin:end, : kept.shape[1]] = kept.masked_fill(kept == total, -1).int()
    return out


def scores(q: Tensor, g: Tensor, keys: Tensor, scale: float) -> Tensor:
    """``scale * sum_h g_h relu(q_h . k_w)``: q [n, H, d], g [n, H], keys [w, d] -> [n, w]."""
    products = torch.relu(wide(q) @ wide(keys).T)  # [n, H, w]
    return (products * wide(g).unsqueeze(-1)).sum(dim=1) * scale


def hadamard(x: Tensor) -> Tensor:
    """``x . Had_d * d^-0.5`` over the last dimension, by butterflies."""
    d = int(x.shape[-1])
    span = 1
    while span < d:
        pairs = x.reshape(*x.shape[:-1], d // (2 * span), 2, span)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), dim=-2).reshape(x.shape)
        span *= 2
    return x * math.sqrt(1 / d)


def e2m1(x: Tensor) -> Tensor:
    """Round a wide x [..., d] to e2m1 times a power of two per group, and back."""
    group = min(GROUP, x.shape[-1])
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(AMAX_FLOOR)
    mantissa, exponent = torch.frexp(amax / LARGEST)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scaled = torch.ldexp(blocks, -exponent).clamp(-LARGEST, LARGEST)
    borders = torch.tensor(_BORDERS, dtype=x.dtype, device=x.device)
    size = scaled.abs()
    # On a border, the even code: up from an odd one (right), down to an even one (left).
    low, high = torch.bucketize(size, borders), torch.bucketize(size, borders, right=True)
    code = torch.where(low % 2 == 0, low, high)
    values = torch.tensor(_VALUES, dtype=x.dtype, device=x.device)
    return torch.ldexp(values[code].copysign(scaled), exponent).reshape(x.shape)
