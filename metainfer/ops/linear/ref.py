"""Linear layer: the reference multiplies in float32 (float64 stays) and rounds once."""

from __future__ import annotations

from torch import Tensor

from metainfer.ops.common import wide
from metainfer.ops.linear.packed import PackedWeight


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x @ Wᵀ + bias``: x [T, K], ``dense@1`` weight [N, K] -> [T, N]."""
    out = wide(x) @ wide(weight.data["weight"]).T
    if weight.bias is not None:
        out = out + wide(weight.bias)
    return out.to(x.dtype)
