"""Routing by one selection over keys that cannot tie: the score's bits above the expert's number.

Comparing two non-negative floats is comparing their bits as whole numbers, and flipping all but
the sign of a negative one puts it in order too; the lower 32 bits then settle a tie for the lower
expert. float64 has no room for that and is sorted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.common import wide


def moe_route(
    x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See `ref.moe_route`."""
    s = _scores(x, gate)
    ids = _highest(s + bias.to(s.dtype), top_k)
    return ids.int(), _weights(s, ids, scale)


def moe_route_hash(
    x: Tensor, gate: Tensor, table: Tensor, token_ids: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """See `ref.moe_route_hash`."""
    ids = table[token_ids]  # [T, k]
    return ids.int(), _weights(_scores(x, gate), ids, scale)


def _scores(x: Tensor, gate: Tensor) -> Tensor:
    """``sqrt(softplus(gate . x))``; above 40, softplus is the identity even in float64."""
    rows = wide(x)
    return F.softplus(rows @ gate.to(rows.dtype).T, threshold=40.0).sqrt_()


def _highest(sums: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest of each row [T, E], ties to the lower: [T, count] int64."""
    if sums.dtype != torch.float32:
        return torch.sort(sums, dim=-1, descending=True, stable=True).indices[:, :count]
    bits = (sums + 0.0).view(torch.int32)  # + 0: there is one zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = sums.shape[1] - 1
    keys = (ordered << 32) + torch.arange(last, -1, -1, device=sums.device)
    return last - (torch.topk(keys, count, dim=-1).values & 0xFFFFFFFF)


def _weights(s: Tensor, ids: Tensor, scale: float) -> Tensor:
    chosen = s.gather(1, ids)
    return chosen.div_(chosen.sum(dim=-1, keepdim=True).add_(1e-20)).mul_(scale)
