"""Token embedding through `torch.nn.functional`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.stored import rows_of


def embed(ids: Tensor, table: PackedWeight) -> Tensor:
    """See `ref.embed`; layout ``dense@1``."""
    return F.embedding(ids, table.data["weight"])


def embed_stored(ids: Tensor, table: PackedWeight) -> Tensor:
    """Rows of a ``stored@1`` table of one tensor, decoded and rounded to the model's type."""
    return rows_of(table, ids)
