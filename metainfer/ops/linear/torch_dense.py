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
    """See `ref.linear_f32`.

    On CUDA the library keeps its sums of bfloat16 products in float32. A matrix unit cuts what it
    lines up: products of bfloat16 have 16 bits and lose nothing that shows, those of float16 have
    22 (1.8e-6 off at 2,048 channels of an H200). So float16, and half types elsewhere, are widened
    some rows at a time.
    """
    matrix = weight.data["weight"]
    if x.is_cuda and x.dtype == matrix.dtype == torch.bfloat16 and x.shape[0]:
        out = torch.mm(x, matrix.T, out_dtype=torch.float32)
        return out if weight.bias is None else out.add_(weight.bias.float())
    rows = wide(x)
    if matrix.dtype == rows.dtype:
        return F.linear(rows, matrix, weight.bias)
    step = max(TILE_ELEMENTS // max(matrix.shape[1], 1), 1)
    parts = [rows @ tile.to(rows.dtype).T for tile in torch.split(matrix, step)]
    out = torch.cat(parts, dim=1)
    return out if weight.bias is None else out.add_(wide(weight.bias))
