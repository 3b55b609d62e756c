"""Token embedding: rows of the packed embedding matrix."""

from __future__ import annotations

from torch import Tensor

from metainfer.ops.linear.packed import PackedWeight


def embed(ids: Tensor, table: PackedWeight) -> Tensor:
    """``out[t] = table[ids[t]]``: ids [T] int64, table ``dense@1`` [V, Dm] -> [T, Dm]."""
    return table.data["weight"][ids]
