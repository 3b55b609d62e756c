"""SwiGLU through `torch.nn.functional.silu`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_EXACT = (torch.float32, torch.float64)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `ref.swiglu`. Half types go through float32, since silu would round in between."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype in _EXACT:
        return F.silu(gate).mul_(up)
    return F.silu(gate.float()).mul_(up).to(gate_up.dtype)
