"""Packing of ``onednn-f32@1``, with the dense copy that a token embedding is read from.

oneDNN's blocked weight cannot be indexed, so what is packed for an ``embed`` site also keeps the
matrix itself (``data["dense"]``); a tied output head then reads the blocked one beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from metainfer.formats.quant import RawTensor
from metainfer.ops.linear import cpu_onednn
from metainfer.ops.linear.packed import PackedWeight, pack_dense


def pack(
    raws: Sequence[RawTensor],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    site: str = "",
) -> PackedWeight:
    """See `cpu_onednn.pack`; a site named ``embed...`` also holds ``dense`` [N, K]."""
    packed = cpu_onednn.pack(raws, bias, dtype=dtype, device=device, site=site)
    if not site.startswith("embed"):
        return packed
    dense = pack_dense(raws, None, dtype=dtype, device=device).data["weight"]
    return dataclasses.replace(packed, data={**packed.data, "dense": dense})


def embed(ids: Tensor, table: PackedWeight) -> Tensor:
    """Rows of the dense copy: ids [T] int64 -> [T, K]."""
    return torch.nn.functional.embedding(ids, table.data["dense"])
