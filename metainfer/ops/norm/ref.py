"""RMS norm, alone and fused with the residual addition. Statistics in float32, one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.common import wide


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension: x [..., D], weight [D]."""
    h = wide(x)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * scale * wide(weight)).to(x.dtype)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``s = x + residual`` rounded to the dtype, then ``(rmsnorm(s), s)``.

    The norm sees the rounded sum, as an unfused model does.
    """
    total = (wide(x) + wide(residual)).to(x.dtype)
    return rmsnorm(total, weight, eps), total
