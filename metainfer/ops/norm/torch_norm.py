"""RMS norm through `torch.nn.functional.rms_norm`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ref.rmsnorm`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ref.add_rmsnorm`."""
    total = x + residual
    return F.rms_norm(total, (total.shape[-1],), weight, eps), total
