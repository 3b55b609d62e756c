"""The indexer for a captured step: every entry that a table has room for is scored and sorted.

A step costs by the width of the page tables, whatever the contexts are. Queries go by blocks, so
that the workspace is bounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, locate, take
from metainfer.ops.common import owners, wide

#: Elements of the keys, or of the products, of one block of queries.
BLOCK = 1 << 24


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
    """See `ref.index_select`."""
    tokens, heads, d = q.shape
    room = page_table.shape[1] * pages.entries
    sequence, real = owners(query_start, tokens)
    seen = torch.where(real, (positions + 1) // ratio, 0).clamp_max(room).unsqueeze(1)  # [T, 1]
    every = torch.arange(room, device=q.device)
    place = torch.arange(min(top_k, room), device=q.device)
    out = torch.full((tokens, top_k), -1, dtype=torch.int32, device=q.device)
    step = max(1, BLOCK // (room * max(heads, d)))
    for low in range(0, tokens, step):
        rows = slice(low, low + step)
        numbers = torch.where(every < seen[rows], every, -1)  # [m, room]
        table = page_table.index_select(0, sequence[rows])
        keys = take(pages, locate(table, pages.entries, numbers).flatten())
        value = _scores(q[rows], g[rows], keys.view(-1, room, d), scale)
        value.masked_fill_(numbers < 0, -math.inf)
        best = torch.sort(value, dim=1, descending=True, stable=True).indices[:, : len(place)]
        best = torch.where(place < seen[rows], best, room).sort(dim=1).values
        out[rows, : len(place)] = torch.where(best < room, best, -1).int()
    return out


def _scores(q: Tensor, g: Tensor, keys: Tensor, scale: float) -> Tensor:
    """As `ref.scores` with keys [m, w, d] of each query's own, NaN as infinity: [m, w]."""
    dtype = torch.promote_types(wide(q).dtype, keys.dtype)
    products = torch.bmm(q.to(dtype), keys.to(dtype).transpose(1, 2)).relu_()  # [m, H, w]
    mixed = torch.bmm(g.to(dtype).unsqueeze(1), products).squeeze(1)
    return mixed.mul_(scale).nan_to_num_(math.inf, math.inf, -math.inf)
