"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.common import wide


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the first R of D channels by the angles of each token's position.

    q [T, Hq, D], k [T, Hkv, D], positions [T] int64, cos_sin [M, R] float32 holding R/2 cosines
    then R/2 sines. Channel i is paired with i + R/2 (``neox``), or 2i with 2i + 1 (`interleaved`):
    ``(a, b) -> (a cos - b sin, b cos + a sin)``. New tensors; one rounding.
    """
    row = cos_sin[positions]  # [T, R]
    return _rotate(q, row, interleaved), _rotate(k, row, interleaved)


def _rotate(x: Tensor, row: Tensor, interleaved: bool) -> Tensor:
    rotated = row.shape[-1]
    wide_x = wide(x)
    cos, sin = row.to(wide_x.dtype).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R/2]
    head = wide_x[..., :rotated]
    if interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
    else:
        a, b = head.chunk(2, dim=-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        turned = torch.stack((first, second), dim=-1).flatten(-2)
    else:
        turned = torch.cat((first, second), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., rotated:]), dim=-1)
