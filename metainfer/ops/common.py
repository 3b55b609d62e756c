"""Helpers shared by the reference implementations."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype that references compute in: float64 stays, everything else is float32."""
    return x if x.dtype == torch.float64 else x.float()
