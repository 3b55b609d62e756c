"""SwiGLU: the gated activation of Llama-type feed-forward layers."""

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
