"""The indexer with few passes: queries turned in place, scores by blocks, a threshold per row.

Asks the host for lengths, so it cannot be captured in a graph.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from metainfer.kv.book.form import EntryForm
from metainfer.kv.store.entries import EntryPages, gather, locate
from metainfer.kv.store.entry_codecs import rounded
from metainfer.ops.common import hadamard, turn_tail_, wide

#: Elements of the products [rows, heads, entries] of one block.
BLOCK = 1 << 22


def index_query(q: Tensor, positions: Tensor, cos_sin: Tensor, form: EntryForm) -> Tensor:
    """See `ref.index_query`; the Hadamard matrix is multiplied with."""
    h = turn_tail_(wide(q).clone(), cos_sin.index_select(0, positions).unsqueeze(1))
    if form.hadamard:
        h = h @ _matrix(q.shape[-1], h.dtype, h.device)
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
    """See `ref.index_select`. Rows that see at most `top_k` entries take them unscored."""
    starts, lens = query_start.tolist(), context_lens.tolist()
    seen = ((positions + 1) // ratio).unsqueeze(1)  # [T, 1]
    every = torch.arange(top_k, device=q.device)
    out = torch.where(every < seen, every, -1).int()
    out[starts[-1] :] = -1
    for s, context in enumerate(lens):
        begin, end = starts[s], starts[s + 1]
        # The first row that sees more than `top_k`.
        row = max(begin, end - context + (top_k + 1) * ratio - 1)
        if row >= end:
            continue
        total = context // ratio
        numbers = torch.arange(total, device=q.device)
        keys = gather(pages, locate(page_table[s], pages.entries, numbers))
        step = max(1, BLOCK // (q.shape[1] * total))
        for low in range(row, end, step):
            high = min(low + step, end)
            most = (context - end + high) // ratio
            value = _scores(q[low:high], g[low:high], keys[:most], scale)
            value.masked_fill_(numbers[:most] >= seen[low:high], float("-inf"))
            out[low:high] = best(value, top_k).int()
    return out


def best(value: Tensor, top_k: int) -> Tensor:
    """The exact set of the `top_k` highest of each row, the lower place on ties, rising.

    value [n, W], W > top_k, no NaN -> int64 [n, top_k].
    """
    least = value.topk(top_k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    taken = value >= least
    if int(taken.sum()) != top_k * value.shape[0]:
        above = value > least
        missing = top_k - above.sum(dim=1, keepdim=True)
        equal = taken & ~above
        taken = above | (equal & (equal.cumsum(dim=1) <= missing))
    return taken.nonzero()[:, 1].view(-1, top_k)


def _scores(q: Tensor, g: Tensor, keys: Tensor, scale: float) -> Tensor:
    """As `ref.scores`, NaN as infinity: [n, w]."""
    dtype = torch.promote_types(wide(q).dtype, keys.dtype)
    rows, heads, d = q.shape
    products = (q.to(dtype).reshape(rows * heads, d) @ keys.to(dtype).T).relu_()
    mixed = torch.bmm(g.to(dtype).unsqueeze(1), products.view(rows, heads, -1)).squeeze(1)
    return mixed.mul_(scale).nan_to_num_(math.inf, math.inf, -math.inf)


@cache
def _matrix(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Had_d * d^-0.5, symmetric."""
    return hadamard(torch.eye(d, dtype=dtype)).to(device)
