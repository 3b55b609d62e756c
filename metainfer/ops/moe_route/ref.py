"""Routing of tokens to experts: the whole row is sorted, so that ties are settled."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.common import wide


def moe_route(
    x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Experts by score plus bias: ids [T, top_k] int32, weights [T, top_k] float32 (or float64).

    x [T, K], gate [E, K], bias [E] float32. Highest first; equal sums go to the lower expert.
    """
    s = scores(x, gate)
    order = torch.sort(s + bias.to(s.dtype), dim=-1, descending=True, stable=True).indices
    ids = order[:, :top_k]
    return ids.int(), _weights(s, ids, scale)


def moe_route_hash(
    x: Tensor, gate: Tensor, table: Tensor, token_ids: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Experts by token id: ids [T, k] int32 are rows of table [V, k]; weights as in `moe_route`."""
    ids = table[token_ids]  # [T, k]
    return ids.int(), _weights(scores(x, gate), ids.long(), scale)


def scores(x: Tensor, gate: Tensor) -> Tensor:
    """``sqrt(softplus(gate . x))`` [T, E], exact above softplus' usual cut-off too."""
    logits = wide(x) @ gate.to(wide(x).dtype).T
    return torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()


def _weights(s: Tensor, ids: Tensor, scale: float) -> Tensor:
    chosen = s.gather(1, ids)
    return chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20) * scale
