"""Grouped output projection: one batched product over the groups, in the model's type."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.stored import matrix


def out_group(o: Tensor, weight: PackedWeight, *, groups: int) -> Tensor:
    """See `ref.out_group`; ``dense@1``."""
    return batched(o, weight.data["weight"], groups)


def out_group_apart(o: Tensor, weight: PackedWeight, *, groups: int) -> Tensor:
    """See `ref.out_group`; ``onednn-f32@1``, which keeps this matrix dense."""
    return batched(o, weight.data["dense"], groups)


def out_group_stored(o: Tensor, weight: PackedWeight, *, groups: int) -> Tensor:
    """See `ref.out_group`; ``stored@1``. The recipe runs it in the model's type, activations as
    they are, whatever the weights are stored in."""
    return batched(o, matrix(weight, o.dtype), groups)


def batched(o: Tensor, weight: Tensor, groups: int) -> Tensor:
    """o [T, ...] of groups K numbers a row, weight [N, K] in o's dtype -> [T, N]."""
    matrices = weight.view(groups, -1, weight.shape[1])  # [G, R, K]
    rows = o.reshape(o.shape[0], groups, weight.shape[1]).transpose(0, 1)  # [G, T, K]
    out = o.new_empty(o.shape[0], groups, matrices.shape[1])  # [T, G, R]
    torch.bmm(rows, matrices.transpose(1, 2), out=out.transpose(0, 1))
    return out.flatten(1)
