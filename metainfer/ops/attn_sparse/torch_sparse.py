"""Sparse attention by blocks of queries: matrix products, one softmax over window and entries.

A chunk shares the latents of its window, and its entries while none is left out; decode, verify
and real selections gather the keys of each query. Asks the host for lengths: no graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, gather, locate
from metainfer.ops.attn_sparse.copies import HELD
from metainfer.ops.common import turn_tail_, wide

#: Elements of the logits, or of the keys of all queries, of one block.
BLOCK = 1 << 22
#: Most queries of a block, rows of its products (queries times heads), fewest queries that share.
QUERIES, PRODUCTS, SHARED = 128, 2048, 9

Part = tuple[Tensor, Tensor]
"""Keys [L, D] of all queries or [m, L, D] of each, and who sees which: bool [m, L]."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What all blocks of a call read."""

    q: Tensor
    local: EntryPages
    local_table: Tensor
    entries: EntryPages | None
    entry_table: Tensor
    selected: Tensor | None
    sinks: Tensor
    positions: Tensor
    scale: float
    window: int
    ratio: int

    def mix(self, rows: Tensor | slice, parts: list[Part]) -> Tensor:
        """One softmax over the keys of all parts and the sink: [m, Hq, D] in the wide type."""
        q = wide(self.q[rows]) * self.scale
        m, heads, d = q.shape
        parts = [(keys.to(q.dtype), seen) for keys, seen in parts if seen.shape[1]]
        logits = []
        for keys, seen in parts:
            if keys.dim() == 2:
                found = (q.view(m * heads, d) @ keys.T).view(m, heads, -1)
            else:
                found = torch.bmm(q, keys.transpose(1, 2))
            logits.append(found.masked_fill_(~seen.unsqueeze(1), float("-inf")))
        sinks = self.sinks.to(q.dtype).expand(m, -1).unsqueeze(2)  # [m, Hq, 1]
        top = sinks
        for found in logits:
            top = torch.maximum(top, found.amax(dim=2, keepdim=True))
        total, mixed = (sinks - top).exp(), q.new_zeros(())
        for found, (keys, _) in zip(logits, parts, strict=True):
            share = found.sub_(top).exp_()
            total = total + share.sum(dim=2, keepdim=True)
            if keys.dim() == 2:
                mixed = mixed + (share.view(m * heads, -1) @ keys).view(m, heads, d)
            else:
                mixed = mixed + torch.bmm(share, keys)
        return mixed.div_(total)


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
    starts, lens = query_start.tolist(), context_lens.tolist()
    out = torch.empty_like(q)
    out[starts[-1] :] = 0
    call = _Call(
        q, local, local_table, entries if ratio else None,
        local_table if entry_table is None else entry_table, selected, sinks, positions,
        scale, window, ratio,
    )  # fmt: skip

    def finish(rows: Tensor | slice, mixed: Tensor) -> None:
        turn = cos_sin[positions[rows]].unsqueeze(1)
        out[rows] = turn_tail_(mixed, turn, inverse=True).to(q.dtype)

    single: list[int] = []
    owners: list[int] = []
    for s, context in enumerate(lens):
        begin, end = starts[s], starts[s + 1]
        if end - begin < SHARED:
            single += range(begin, end)
            owners += [s] * (end - begin)
            continue
        for rows, mixed in _chunk(call, s, begin, end, context):
            finish(rows, mixed)
    if single:
        lone = torch.tensor(single, device=q.device)
        for part, mixed in _apart(call, lone, torch.tensor(owners, device=q.device)):
            finish(part, mixed)
    return out


def _chunk(
    call: _Call, s: int, begin: int, end: int, context: int
) -> Iterator[tuple[slice, Tensor]]:
    """The rows of one sequence that brings many, by blocks that share keys."""
    first, (_, heads, d) = context - (end - begin), call.q.shape
    low = max(0, first - call.window + 1)
    near = torch.arange(low, context, device=call.q.device)
    latents = gather(call.local, locate(call.local_table[s], call.local.entries, near))
    offered = context // call.ratio if call.entries is not None else 0
    taken = offered if call.selected is None else min(offered, call.selected.shape[1])
    every = None
    if call.entries is not None and offered * d <= HELD and offered <= taken * (end - begin):
        numbers = torch.arange(offered, device=call.q.device)
        every = gather(call.entries, locate(call.entry_table[s], call.entries.entries, numbers))
    apart = taken * d if taken < offered else 1
    step = min(QUERIES, max(PRODUCTS // heads, 16))
    step = max(1, min(step, BLOCK // max(heads * (call.window + QUERIES + taken), apart)))
    for a in range(begin, end, step):
        b = min(a + step, end)
        own, last = call.positions[a:b].unsqueeze(1), first + b - begin
        start = max(0, first + a - begin - call.window + 1)
        span = near[start - low : last - low]
        seen = (span <= own) & (span > own - call.window)
        parts: list[Part] = [(latents[start - low : last - low], seen)]
        if call.entries is not None:
            parts.append(_offered(call, s, slice(a, b), last // call.ratio, every))
        yield slice(a, b), call.mix(slice(a, b), parts)


def _offered(call: _Call, s: int, rows: slice, total: int, every: Tensor | None) -> Part:
    """What a block of one sequence's rows takes of its first `total` entries.

    `every`: all entries of the sequence decoded, or None to read those that are taken.
    """
    pages, table = call.entries, call.entry_table[s]
    assert pages is not None

    def read(numbers: Tensor) -> Tensor:
        if every is not None:
            return every.index_select(0, numbers)
        return gather(pages, locate(table, pages.entries, numbers))

    picked = None if call.selected is None else _trimmed(call.selected[rows])
    if picked is None or total <= picked.shape[1]:
        mask = _mask(_visible(call.positions[rows], call.ratio), picked, total)
        used = mask.any(dim=0).nonzero().squeeze(1)
        return read(used), mask[:, used]
    seen = picked >= 0
    keys = read(picked.clamp_min(0).flatten()).view(*picked.shape, pages.form.width)
    if not bool(seen.all()):
        keys.masked_fill_(~seen.unsqueeze(2), 0.0)  # place 0 may be unwritten
    return keys, seen


def _apart(call: _Call, rows: Tensor, owners: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows [m] of any sequences (`owners` [m]), each with keys of its own, by blocks."""
    d, own = call.q.shape[2], call.positions[rows]
    seen = _visible(own, call.ratio) if call.entries is not None else own.new_zeros(1)
    most = int(seen.max())
    if call.selected is not None:
        most = min(most, call.selected.shape[1])
    window = min(call.window, int(own.max()) + 1)
    step = max(1, BLOCK // ((window + most) * max(d, call.q.shape[1])))
    for low in range(0, len(rows), step):
        part, mine = rows[low : low + step], owners[low : low + step]
        at = call.positions[part].unsqueeze(1)
        near = at - torch.arange(window - 1, -1, -1, device=rows.device)
        parts = [_gathered(call.local, call.local_table[mine], near)]
        if call.entries is not None:
            if call.selected is None:
                total = _visible(at, call.ratio)
                every = torch.arange(int(total.max()), device=rows.device)
                numbers = torch.where(every < total, every, -1)
            else:
                numbers = _trimmed(call.selected[part])
            parts.append(_gathered(call.entries, call.entry_table[mine], numbers))
        yield part, call.mix(part, parts)


def _visible(positions: Tensor, ratio: int) -> Tensor:
    """Entries whose windows have closed, the own token's among them."""
    return (positions + 1) // ratio


def _mask(seen: Tensor, picked: Tensor | None, total: int) -> Tensor:
    """bool [m, total]: the entries that each row reads, of the `seen` [m] first or the picked."""
    if picked is None:
        return torch.arange(total, device=seen.device) < seen.unsqueeze(1)
    mask = torch.zeros((len(seen), total + 1), dtype=torch.bool, device=seen.device)
    rows = torch.arange(len(seen), device=seen.device).unsqueeze(1)
    mask[rows, torch.where(picked >= 0, picked, total)] = True
    return mask[:, :total]


def _gathered(pages: EntryPages, tables: Tensor, numbers: Tensor) -> Part:
    """The entries `numbers` [m, L] (negative: none) of each row's table [m, W]."""
    keys = gather(pages, locate(tables, pages.entries, numbers).flatten())
    return keys.view(*numbers.shape, pages.form.width), numbers >= 0


def _trimmed(picked: Tensor) -> Tensor:
    """`picked` [m, k] int32 as int64, with as few places as its longest row needs."""
    most = int((picked >= 0).sum(dim=1).max())
    if most < picked.shape[1]:
        picked = picked.sort(dim=1, descending=True).values[:, :most]
    return picked.long()
