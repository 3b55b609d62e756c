"""Packing of a layer's experts: one matrix of all, in the model's type or as stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from metainfer.formats.quant import Stored
from metainfer.ops.linear import packed
from metainfer.ops.linear.packed import PackedWeight

DENSE = "experts-dense@1"


def pack_dense(
    raws: Sequence[Stored],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    site: str = "",
) -> PackedWeight:
    """``experts-dense@1``: `packed.pack_dense` of all experts, [E 2F, D] or [E D, F]."""
    held = packed.pack_dense(raws, bias, dtype=dtype, device=device, site=site)
    return dataclasses.replace(held, layout=DENSE)
