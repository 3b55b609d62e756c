"""Linear layer through `torch.nn.functional.linear`: cuBLAS on CUDA, oneDNN or MKL on CPU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.linear.packed import PackedWeight


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """See `ref.linear`; accumulation order is the library's."""
    return F.linear(x, weight.data["weight"], weight.bias)
