"""Token embedding through `torch.nn.functional`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.linear.packed import PackedWeight


def embed(ids: Tensor, table: PackedWeight) -> Tensor:
    """See `ref.embed`; layout ``dense@1``."""
    return F.embedding(ids, table.data["weight"])
