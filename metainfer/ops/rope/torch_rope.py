"""Rotary position embedding, one pass over q and k written into their outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.common import wide


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """See `ref.rope`."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    row = cos_sin.index_select(0, positions).to(dtype).unsqueeze(1)  # [T, 1, R]
    cos, sin = row.chunk(2, dim=-1)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotated = 2 * cos.shape[-1]
    out = torch.empty_like(x)
    if interleaved:
        first, second = slice(0, rotated, 2), slice(1, rotated, 2)
    else:
        first, second = slice(0, rotated // 2), slice(rotated // 2, rotated)
    a, b = wide(x[..., first]), wide(x[..., second])
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    if rotated < x.shape[-1]:
        out[..., rotated:] = x[..., rotated:]
    return out
