"""Linear layer through `torch.nn.functional.linear`: cuBLAS on CUDA, oneDNN or MKL on CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.common import wide
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.stored import TILE_ELEMENTS


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """See `ref.linear`; accumulation order is the library's."""
    return F.linear(x, weight.data["weight"], weight.bias)


def linear_f32(x: Tensor, weight: PackedWeight) -> Tensor:
    """See `ref.linear_f32`; a weight in a half type is widened some rows at a time."""
    matrix, rows = weight.data["weight"], wide(x)
    if matrix.dtype == rows.dtype:
        return F.linear(rows, matrix, weight.bias)
    step = max(TILE_ELEMENTS // max(matrix.shape[1], 1), 1)
    parts = [rows @ tile.to(rows.dtype).T for tile in torch.split(matrix, step)]
    out = torch.cat(parts, dim=1)
    return out if weight.bias is None else out.add_(wide(weight.bias))
