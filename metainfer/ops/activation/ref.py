"""SwiGLU: the gated activation of Llama-type feed-forward layers, and with a clamp."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.common import wide


def swiglu(gate_up: Tensor) -> Tensor:
    """``g * sigmoid(g) * u`` with g, u the halves of the last dimension: [T, 2F] -> [T, F].

    One rounding at the end.
    """
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def swiglu_clamp(gate_up: Tensor, limit: float) -> Tensor:
    """`swiglu` of ``min(g, limit)`` and ``clamp(u, -limit, limit)``; limit 0 clamps nothing.

    The gate has no lower clamp. [T, 2F] -> [T, F], one rounding at the end.
    """
    gate, up = wide(gate_up).chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
