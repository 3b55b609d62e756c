"""`latent_qkv` with few passes over the queries."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, store
from metainfer.ops.common import turn_tail_, wide


def latent_qkv(
    q: Tensor,
    kv: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    pages: EntryPages,
    slots: Tensor,
    *,
    eps: float,
    norm_q: bool,
) -> Tensor:
    """See `ref.latent_qkv`."""
    turn = cos_sin.index_select(0, positions)
    latent = normed(wide(kv), eps).mul_(wide(kv_weight))
    store(pages, slots, turn_tail_(latent, turn))
    heads = normed(wide(q), eps) if norm_q else wide(q).clone()
    return turn_tail_(heads, turn.unsqueeze(1)).to(q.dtype)


def normed(x: Tensor, eps: float) -> Tensor:
    """`x` over the root of its mean square, per row."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.rsqrt(size.square_().div_(x.shape[-1]).add_(eps))
