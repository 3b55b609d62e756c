"""Sparse attention for a captured step: each query gathers a whole window and all listed entries.

What lies outside its context is masked on the device. Where no entries are listed, a step costs by
the width of the entry table, whatever the contexts are. Queries go by blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, locate, take
from metainfer.ops.common import owners, turn_tail_, wide

#: Elements of the keys of one block of queries.
BLOCK = 1 << 24


def attn_sparse(
    q: Tensor,
    local: EntryPages,
    local_table: Tensor,
    entries: EntryPages | None,
    entry_table: Tensor | None,
    selected: Tensor | None,
    sinks: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int,
    ratio: int,
) -> Tensor:
    """See `ref.attn_sparse`."""
    tokens, heads, d = q.shape
    sequence, real = owners(query_start, tokens)
    own = torch.where(real, positions, 0).unsqueeze(1)  # [T, 1]
    near = own - torch.arange(window - 1, -1, -1, device=q.device)  # [T, window]; negative: none
    kinds = [(local, local_table, near)]
    if entries is not None and entry_table is not None and ratio:
        numbers = selected
        if numbers is None:
            every = torch.arange(entry_table.shape[1] * entries.entries, device=q.device)
            numbers = torch.where(every < (own + 1) // ratio, every, -1)
        kinds.append((entries, entry_table, numbers.long()))
    turn = cos_sin.index_select(0, own.squeeze(1)).unsqueeze(1)
    out = torch.empty_like(q)
    step = max(1, BLOCK // (sum(numbers.shape[1] for *_, numbers in kinds) * max(d, heads)))
    for low in range(0, tokens, step):
        rows = slice(low, low + step)
        mine = sequence[rows]
        parts = [
            _gathered(pages, table.index_select(0, mine), numbers[rows])
            for pages, table, numbers in kinds
        ]
        keys = torch.cat([part for part, _ in parts], dim=1)  # [m, L, D]
        seen = torch.cat([mask for _, mask in parts], dim=1)  # [m, L]
        mixed = _attend(wide(q[rows]), keys, seen, sinks, scale)
        out[rows] = turn_tail_(mixed, turn[rows], inverse=True).to(q.dtype)
    return out


def _gathered(pages: EntryPages, tables: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The entries `numbers` [m, L] (negative: none) of each row's table [m, W], and which are."""
    keys = take(pages, locate(tables, pages.entries, numbers).flatten())
    return keys.view(*numbers.shape, pages.form.width), numbers >= 0


def _attend(q: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """q [m, Hq, D], keys [m, L, D], seen [m, L], sinks [Hq] -> [m, Hq, D]."""
    keys = keys.to(q.dtype)
    logits = torch.bmm(q * scale, keys.transpose(1, 2))
    logits.masked_fill_(~seen.unsqueeze(1), float("-inf"))
    sink = sinks.to(q.dtype).expand(len(q), -1).unsqueeze(2)
    shares = torch.softmax(torch.cat((logits, sink), dim=2), dim=2)
    return torch.bmm(shares[:, :, :-1], keys)
