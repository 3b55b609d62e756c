"""Linear layers on weights as stored, in the arithmetic of the checkpoint's recipe.

Block-scaled weights meet rounded activations (`rounding`), and products and sums are float32, as
of a card's FP8 instructions; plain weights multiply in the model's type. Nothing is decoded at
load, so every call widens the weights again, some rows at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.common import wide
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.rounding import activation_group, round_activations
from metainfer.ops.linear.stored import tiles


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x @ Wᵀ + bias``: x [T, K], ``stored@1`` weight [N, K] -> [T, N]."""
    if weight.format is None:
        return F.linear(x, weight.data["weight"].to(x.dtype), weight.bias)
    return linear_f32(x, weight).to(x.dtype)


def linear_f32(x: Tensor, weight: PackedWeight) -> Tensor:
    """`linear` whose result keeps float32 (float64 in float64)."""
    rows, plain = wide(x), weight.data.get("weight")
    if weight.format is not None:
        rows = round_activations(rows, activation_group(weight.format))
    rounds = plain is not None and plain.dtype != x.dtype  # to the model's type, as in `linear`
    out = rows.new_empty((rows.shape[0], weight.shape[0]))  # [T, N]
    for row, tile in tiles(weight):
        held = tile.to(x.dtype) if rounds else tile
        torch.matmul(rows, held.to(rows.dtype).T, out=out[:, row : row + tile.shape[0]])
    return out if weight.bias is None else out.add_(wide(weight.bias))
