"""Packing of ``onednn-f32@1``: blocked for products, dense for a token embedding.

oneDNN's blocked weight cannot be indexed, so an ``embed`` site holds the matrix itself; a tied
output head holds the blocked one beside it (the layout declares `embed_apart`). It cannot be cut
into groups either: ``out_group`` reads the matrix too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metainfer.formats.quant import Stored
from metainfer.ops.linear import cpu_onednn
from metainfer.ops.linear.packed import PackedWeight, pack_dense

APART = ("embed", "out_group")
"""Sites that read the matrix itself."""


def pack(
    raws: Sequence[Stored],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    site: str = "",
) -> PackedWeight:
    """See `cpu_onednn.pack`; at the sites of `APART` the data is ``dense`` [N, K] alone."""
    if site not in APART:
        return cpu_onednn.pack(raws, bias, dtype=dtype, device=device, site=site)
    held = pack_dense(raws, bias, dtype=dtype, device=device, site=site)
    data = {"dense": held.data["weight"]}
    return PackedWeight(cpu_onednn.LAYOUT, held.shape, data, held.bias, site)


def embed(ids: Tensor, table: PackedWeight) -> Tensor:
    """Rows of the dense matrix: ids [T] int64 -> [T, K]."""
    return torch.nn.functional.embedding(ids, table.data["dense"])
