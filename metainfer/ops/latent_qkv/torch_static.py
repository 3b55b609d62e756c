"""`latent_qkv` for a captured step: as `torch_latent`, and the host is asked nothing."""

from __future__ import annotations

from torch import Tensor

from metainfer.kv.store.entries import EntryPages, put
from metainfer.ops.common import turn_tail_, wide
from metainfer.ops.latent_qkv.torch_latent import normed


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
    put(pages, slots, turn_tail_(latent, turn))
    heads = normed(wide(q), eps) if norm_q else wide(q).clone()
    return turn_tail_(heads, turn.unsqueeze(1)).to(q.dtype)
