"""Queries normed per head and turned; the latent normed, turned and stored."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, store
from metainfer.ops.common import rotate_tail, wide


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
    """Returns the queries [T, H, d] as attention takes them, in q's dtype; stores the latents.

    q [T, H, d]; kv [T, d]; kv_weight [d]; positions, slots [T] int64, -1 stores nothing;
    cos_sin [M, R] float32. See the folder's README.
    """
    turn = cos_sin[positions]
    latent = rms(wide(kv), eps) * wide(kv_weight)
    store(pages, slots, rotate_tail(latent, turn))
    heads = rms(wide(q), eps) if norm_q else wide(q)
    return rotate_tail(heads, turn.unsqueeze(1)).to(q.dtype)


def rms(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps)`` over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
