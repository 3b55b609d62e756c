"""Paged attention by gathering each sequence and calling `scaled_dot_product_attention`.

Reads lengths on the host, so it waits for the device and cannot be captured in a graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.attn_paged.masks import WORKSPACE, mask_bytes


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
        first = _first(context - queries, window)
        places = _places(page_table[s], k_cache.shape[1], first, context)
        keys = k_cache.flatten(0, 1)[places].transpose(0, 1)  # [Hkv, L, D]
        values = v_cache.flatten(0, 1)[places].transpose(0, 1)
        block = max(1, WORKSPACE // mask_bytes(context - first, q.element_size()))
        for at in range(begin, end, block):
            count = min(block, end - at)
            last = context - (end - at) + count  # behind the block's last query
            near = _first(last - count, window)
            rows = q[at : at + count].view(count, hkv, group, d).permute(1, 2, 0, 3)
            if count == 1:  # the heads of a group share their keys: they are rows of one matrix
                rows = rows.transpose(1, 2)
            seen, shape = slice(near - first, last - first), (-1, rows.shape[1], -1, -1)
            mixed = F.scaled_dot_product_attention(
                rows,
                keys[:, None, seen].expand(shape),
                values[:, None, seen].expand(shape),
                attn_mask=_mask(near, last, count, window, q.device),
                scale=scale,
            )
            if count == 1:
                mixed = mixed.transpose(1, 2)
            out[at : at + count] = mixed.permute(2, 0, 1, 3).reshape(count, hkv * group, d)
        del keys, values  # before the next sequence's are gathered
    return out


def _first(position: int, window: int) -> int:
    """The first key that a query at `position` sees."""
    return max(0, position - window + 1) if window else 0


def _mask(first: int, last: int, count: int, window: int, device: torch.device) -> Tensor | None:
    """bool [count, keys]: which keys ``first .. last - 1`` each of the last `count` positions sees;
    None for one query, which sees all of them."""
    if count == 1:
        return None
    keys = torch.arange(first, last, device=device)
    queries = torch.arange(last - count, last, device=device)[:, None]
    seen = keys <= queries
    if window:
        seen &= keys > queries - window
    return seen


def _places(pages: Tensor, page: int, first: int, last: int) -> Tensor:
    """Where the tokens ``first .. last - 1`` of one sequence stand in the flat cache."""
    tokens = torch.arange(first, last, device=pages.device)
    return pages[tokens // page].long() * page + tokens % page
