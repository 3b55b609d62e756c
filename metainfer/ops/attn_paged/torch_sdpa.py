"""Paged attention by gathering each sequence and calling `scaled_dot_product_attention`.

Reads lengths on the host, so it waits for the device and cannot be captured in a graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    """See `ref.attn_paged`."""
    out = torch.zeros_like(q)
    starts, lens = query_start.tolist(), context_lens.tolist()
    hkv, d = k_cache.shape[2], q.shape[2]
    group = q.shape[1] // hkv
    for s, context in enumerate(lens):
        begin, end = starts[s], starts[s + 1]
        queries = end - begin
        if queries == 0:
            continue
        first = max(0, context - queries - window + 1) if window else 0
        places = _places(page_table[s], k_cache.shape[1], first, context)
        keys = k_cache.flatten(0, 1)[places].transpose(0, 1)  # [Hkv, L, D]
        values = v_cache.flatten(0, 1)[places].transpose(0, 1)
        # The queries of a group share their keys: they become rows of one matrix.
        rows = q[begin:end].view(queries, hkv, group, d).permute(1, 2, 0, 3)
        rows = rows.reshape(hkv, group * queries, d)
        mask = None
        if queries > 1:
            reach = torch.arange(first, context, device=q.device)  # behind each query, or before it
            back = torch.arange(context - queries, context, device=q.device)[:, None] - reach
            seen = back >= 0
            mask = (seen & (back < window) if window else seen).repeat(group, 1)
        mixed = F.scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=mask, scale=scale
        )[0]
        mixed = mixed.view(hkv, group, queries, d).permute(2, 0, 1, 3)
        out[begin:end] = mixed.reshape(queries, hkv * group, d)
    return out


def _places(pages: Tensor, page: int, first: int, last: int) -> Tensor:
    """Where the tokens ``first .. last - 1`` of one sequence stand in the flat cache."""
    tokens = torch.arange(first, last, device=pages.device)
    return pages[tokens // page].long() * page + tokens % page
