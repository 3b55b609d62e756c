"""Grouped output projection: one product per group of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.common import wide
from metainfer.ops.linear.packed import PackedWeight


def out_group(o: Tensor, weight: PackedWeight, *, groups: int) -> Tensor:
    """``z_g = W_g . o_g``: o [T, H, d], ``dense@1`` weight [G R, H d / G] -> [T, G R].

    Rows ``g R .. (g + 1) R - 1`` of the weight belong to group g.
    """
    matrices = wide(weight.data["weight"]).view(groups, -1, weight.shape[1])  # [G, R, K]
    rows = wide(o).reshape(-1, groups, weight.shape[1])  # [T, G, K]
    return torch.einsum("tgk,grk->tgr", rows, matrices).flatten(1).to(o.dtype)
