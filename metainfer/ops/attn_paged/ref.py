"""Causal attention over a paged cache: one sequence at a time, gathered, masked, exact softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.common import wide


def attn_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
) -> Tensor:
    """``softmax(scale * q kᵀ) v`` for every query over the keys it may see.

    q [T, Hq, D]; caches [P, G, Hkv, D]; page_table [S, W] int32, entry w holds tokens
    ``w*G .. w*G + G - 1``; query_start [S + 1] int32; context_lens [S] int32 count the tokens in
    the cache *including* this call's. Query j of sequence s stands at
    ``context_lens[s] - qlen[s] + j``, sees keys at positions <= its own and, with a window,
    > its own - window. Head h reads cache head ``h // (Hq / Hkv)``. Rows after the last sequence
    (padding) are zero in the reference and unspecified elsewhere.
    """
    out = torch.zeros_like(q)
    starts, lens = query_start.tolist(), context_lens.tolist()
    for s, context in enumerate(lens):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        first = max(0, context - (end - begin) - window + 1) if window else 0
        keys = wide(gather(k_cache, page_table[s], first, context))  # [L, Hkv, D]
        values = wide(gather(v_cache, page_table[s], first, context))
        group = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", wide(q[begin:end]), keys) * scale
        mask = visible(context, end - begin, first, window, q.device)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def gather(cache: Tensor, pages: Tensor, first: int, last: int) -> Tensor:
    """Cache rows of positions ``first .. last - 1`` of one sequence: [last - first, Hkv, D]."""
    page_tokens = cache.shape[1]
    low = first // page_tokens
    used = pages[low : -(-last // page_tokens)].long()
    rows = cache[used].flatten(0, 1)
    return rows[first - low * page_tokens : last - low * page_tokens]


def visible(context: int, queries: int, first: int, window: int, device: torch.device) -> Tensor:
    """Which keys each query sees: bool [queries, context - first]; column 0 is key `first`."""
    own = torch.arange(context - queries, context, device=device).unsqueeze(1)
    key = torch.arange(first, context, device=device).unsqueeze(0)
    seen = key <= own
    return seen & (key > own - window) if window else seen
