"""Linear layer: the reference multiplies in float32 (float64 stays) and rounds once."""

from __future__ import annotations

from torch import Tensor

from metainfer.ops.common import wide
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.rounding import activation_group, round_activations


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x @ Wᵀ + bias``: x [T, K], ``dense@1`` weight [N, K] -> [T, N]."""
    return linear_f32(x, weight).to(x.dtype)


def linear_f32(x: Tensor, weight: PackedWeight) -> Tensor:
    """`linear` whose result keeps float32 (float64 in float64): [T, K] -> [T, N]."""
    out = wide(x) @ wide(weight.data["weight"]).T
    return out if weight.bias is None else out + wide(weight.bias)


def linear_rounded(x: Tensor, weight: PackedWeight) -> Tensor:
    """`linear` as the recipe of a block-scaled weight computes it (`rounding`)."""
    return linear_f32_rounded(x, weight).to(x.dtype)


def linear_f32_rounded(x: Tensor, weight: PackedWeight) -> Tensor:
    """`linear_f32` likewise."""
    assert weight.format is not None
    return linear_f32(round_activations(wide(x), activation_group(weight.format)), weight)
