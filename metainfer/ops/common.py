"""Helpers shared by the reference implementations."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype that references compute in: float64 stays, everything else is float32."""
    return x if x.dtype == torch.float64 else x.float()


def rotate_tail(x: Tensor, row: Tensor, *, inverse: bool = False) -> Tensor:
    """Turn the last R channels of a wide x [..., D] by pairs (2i, 2i + 1), or back.

    `row` [..., R], R/2 cosines then R/2 sines, is broadcast over x's leading dimensions.
    """
    rotated = row.shape[-1]
    cos, sin = row.to(x.dtype).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    a, b = x[..., -rotated::2], x[..., 1 - rotated :: 2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rotated], turned), dim=-1)


def turn_tail_(x: Tensor, row: Tensor, *, inverse: bool = False) -> Tensor:
    """`rotate_tail` in place; `x` may be any strided view."""
    rotated = row.shape[-1]
    cos, sin = row.to(x.dtype).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    a, b = x[..., -rotated::2], x[..., 1 - rotated :: 2]
    turned = a * cos - b * sin
    b.copy_(b * cos + a * sin)
    a.copy_(turned)
    return x


def hadamard(x: Tensor) -> Tensor:
    """``x . Had_d * d^-0.5`` over the last dimension, d = 2^n, by butterflies."""
    d = int(x.shape[-1])
    span = 1
    while span < d:
        pairs = x.reshape(*x.shape[:-1], d // (2 * span), 2, span)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), dim=-2).reshape(x.shape)
        span *= 2
    return x * math.sqrt(1 / d)


def owners(query_start: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Each row's sequence, and whether it has one, without asking the host: int64, bool [T].

    `query_start` [S + 1] int32. Padding rows are given the last sequence.
    """
    at = torch.arange(tokens, dtype=query_start.dtype, device=query_start.device)
    found = torch.searchsorted(query_start[1:].contiguous(), at, right=True)
    return found.clamp_max(query_start.shape[0] - 2), at < query_start[-1]
