"""Grouped output projection: one product per group of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.common import wide


def out_group(o: Tensor, weight: Tensor) -> Tensor:
    """``z_g = weight_g . o_g``: o [T, Hq, D], weight [G, N, Hq D / G] -> [T, G N]."""
    groups, _, k = weight.shape
    rows = wide(o).reshape(-1, groups, k)
    return torch.einsum("tgk,gnk->tgn", rows, wide(weight)).flatten(1).to(o.dtype)
