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


def swiglu_clamp(gate_up: Tensor, limit: float) -> Tensor:
    """See `ref.swiglu_clamp`."""
    if not limit:
        return swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype not in _EXACT:
        gate, up = gate.float(), up.float()
    return F.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit)).to(gate_up.dtype)
