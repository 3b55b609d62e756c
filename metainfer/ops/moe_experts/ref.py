"""Experts, one after the other, on the tokens that chose them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.common import wide


def moe_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, *, limit: float = 0.0
) -> Tensor:
    """``sum_k w2[e] (weights_k * h_e(x))``, e = ids_k: [T, D] in x's dtype.

    x [T, D]; ids [T, k] int32, -1 for none; weights [T, k] float32; w13 [E, 2F, D], gate rows
    first; w2 [E, D, F]. Experts without a token are not touched.
    """
    rows = wide(x)
    out = torch.zeros_like(rows)
    for expert in range(w13.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        hidden = _hidden(rows[token], w13[expert], limit)
        hidden = hidden * weights[token, slot].to(rows.dtype).unsqueeze(1)
        out.index_add_(0, token, hidden @ wide(w2[expert]).T)
    return out.to(x.dtype)


def moe_shared(x: Tensor, w13: Tensor, w2: Tensor, *, limit: float = 0.0) -> Tensor:
    """``w2 h(x)``, the expert that every token passes: w13 [2F, D], w2 [D, F] -> [T, D]."""
    return (_hidden(wide(x), w13, limit) @ wide(w2).T).to(x.dtype)


def _hidden(rows: Tensor, w13: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``: [rows, F]."""
    gate, up = (rows @ wide(w13).T).chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up
