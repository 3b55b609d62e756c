"""The lightning indexer: queries turned and rounded as keys are, scores, an exact top-k set."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.kv.book.form import EntryForm
from metainfer.kv.store.entries import EntryPages, gather, locate
from metainfer.kv.store.entry_codecs import rounded
from metainfer.ops.common import hadamard, rotate_tail, wide
from metainfer.ops.compress.ref import visible_entries


def index_query(q: Tensor, positions: Tensor, cos_sin: Tensor, form: EntryForm) -> Tensor:
    """Rope on the tail, then what `form` does to keys (Hadamard, rounding): q [T, H, d].

    positions [T] int64; cos_sin [M, R] float32. One more rounding, to q's dtype, at the end.
    """
    h = rotate_tail(wide(q), cos_sin[positions].unsqueeze(1))
    if form.hadamard:
        h = hadamard(h)
    return rounded(form, h).to(q.dtype)


def index_select(
    q: Tensor,
    g: Tensor,
    pages: EntryPages,
    page_table: Tensor,
    positions: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    ratio: int,
    top_k: int,
    scale: float,
) -> Tensor:
    """The `top_k` best visible entries of each query, rising, then -1: [T, top_k] int32.

    q [T, H, d]; g [T, H]; page_table [S, W] int32; positions [T] int64; query_start [S + 1],
    context_lens [S] int32, tokens placed as in `attn_paged`.
    """
    out = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    starts = query_start.tolist()
    for s, context in enumerate(context_lens.tolist()):
        begin, end = starts[s], starts[s + 1]
        total = context // ratio
        if begin == end or total == 0:
            continue
        every = torch.arange(total, device=q.device)
        seen = visible_entries(positions[begin:end], ratio).unsqueeze(1)  # [n, 1]
        keys = gather(pages, locate(page_table[s], pages.entries, every))
        value = scores(q[begin:end], g[begin:end], keys, scale)
        value = value.masked_fill(every >= seen, float("-inf"))
        order = torch.sort(value, dim=-1, descending=True, stable=True).indices[:, :top_k]
        kept = order.masked_fill(torch.arange(order.shape[1], device=q.device) >= seen, total)
        kept = kept.sort(dim=-1).values
        out[begin:end, : kept.shape[1]] = kept.masked_fill(kept == total, -1).int()
    return out


def scores(q: Tensor, g: Tensor, keys: Tensor, scale: float) -> Tensor:
    """``scale * sum_h g_h relu(q_h . k_w)``: q [n, H, d], g [n, H], keys [w, d] -> [n, w].

    float32; float64 where q or the keys are.
    """
    dtype = torch.promote_types(wide(q).dtype, wide(keys).dtype)
    products = torch.relu(q.to(dtype) @ keys.to(dtype).T)  # [n, H, w]
    return (products * g.to(dtype).unsqueeze(-1)).sum(dim=1) * scale
