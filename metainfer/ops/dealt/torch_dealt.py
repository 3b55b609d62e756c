"""The same in whole-tensor torch, without asking the host: for eager steps and captured ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, locate, take
from metainfer.ops.common import owners, turn_tail_, wide
from metainfer.ops.dealt.empty import EMPTY

#: Elements of the keys of one block of queries.
BLOCK = 1 << 24


def attn_part(
    q: Tensor,
    pages: EntryPages,
    page_table: Tensor,
    listed: Tensor,
    sinks: Tensor | None,
    query_start: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `ref.attn_part`."""
    tokens, heads, d = q.shape
    sequence, real = owners(query_start, tokens)
    numbers = torch.where(real.unsqueeze(1), listed, -1).long()
    mixed, logs = torch.empty_like(wide(q)), wide(q).new_empty(tokens, heads)
    step = max(1, BLOCK // (max(numbers.shape[1], 1) * max(d, heads)))
    for low in range(0, tokens, step):
        rows = slice(low, low + step)
        table = _tables(page_table, sequence[rows])
        keys = take(pages, locate(table, pages.entries, numbers[rows]).flatten())
        keys = keys.view(*numbers[rows].shape, d).to(mixed.dtype)  # [m, k, D]
        logits = torch.bmm(wide(q[rows]) * scale, keys.transpose(1, 2))  # [m, Hq, k]
        mixed[rows], logs[rows] = _mix(logits, numbers[rows] >= 0, keys, sinks)
    return mixed, logs


def attn_paged_part(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    counts: Tensor,
    query_start: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `ref.attn_paged_part`; a step costs by the width of the page table."""
    tokens, heads, d = q.shape
    (_, size, hkv, _), group = k_cache.shape, heads // k_cache.shape[2]
    sequence, real = owners(query_start, tokens)
    room = page_table.shape[1] * size
    seen = torch.arange(room, device=q.device) < torch.where(real, counts, 0).unsqueeze(1)
    mixed, logs = torch.empty_like(wide(q)), wide(q).new_empty(tokens, heads)
    step = max(1, BLOCK // (room * hkv * max(d, group)))
    for low in range(0, tokens, step):
        rows = slice(low, low + step)
        table = _tables(page_table, sequence[rows]).clamp_min(0).long()  # [m, W]
        known = seen[rows]
        keys, values = (
            cache[table].flatten(1, 2).to(mixed.dtype)  # [m, L, Hkv, D]
            .masked_fill_(~known[:, :, None, None], 0.0).transpose(1, 2).flatten(0, 1)
            for cache in (k_cache, v_cache)
        )  # fmt: skip
        mine = wide(q[rows]).reshape(-1, group, d) * scale  # [m Hkv, group, D]
        logits = torch.bmm(mine, keys.transpose(1, 2))
        mix, log = _mix(logits, known.repeat_interleave(hkv, 0), values, None)
        mixed[rows], logs[rows] = mix.view(-1, heads, d), log.view(-1, heads)
    return mixed, logs


def _tables(page_table: Tensor, sequence: Tensor) -> Tensor:
    """The table of each row [m, W]; -1 where a domain computes padding alone and has none."""
    if not len(page_table):
        return page_table.new_full((len(sequence), page_table.shape[1]), -1)
    return page_table.index_select(0, sequence)


def _mix(
    logits: Tensor, seen: Tensor, values: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """logits [m, H, L], seen [m, L], values [m, L, D], sinks [H] -> mix [m, H, D], logs [m, H]."""
    logits = logits.masked_fill_(~seen.unsqueeze(1), -math.inf)
    floor = logits.new_full((*logits.shape[:2], 1), EMPTY)
    if sinks is not None:
        floor = sinks.to(logits.dtype).view(1, -1, 1).expand(len(logits), -1, -1)
    # The last column is the sink, or what keeps an empty row finite: it weighs 0 beside any key.
    log = torch.logsumexp(torch.cat((logits, floor), dim=2), dim=2, keepdim=True)
    return torch.bmm((logits - log).exp_(), values), log.squeeze(2)


def attn_weigh(
    q: Tensor,
    mixed: Tensor,
    logs: Tensor,
    near: Tensor | None,
    cos_sin: Tensor | None,
    positions: Tensor,
    *,
    rank: int,
) -> Tensor:
    """See `ref.attn_weigh`."""
    ranks, (tokens, heads, width) = logs.shape[0], q.shape
    every = logs[..., : ranks * heads].reshape(ranks, tokens, ranks, heads)
    total = torch.logsumexp(every, dim=0)  # [T, N, h]
    if near is not None:
        total = torch.logaddexp(total, logs[..., ranks * heads :].transpose(0, 1))
    shares = (every[rank] - total).exp_().unsqueeze(3)
    out: Tensor = mixed.view(tokens, ranks, heads, width) * shares
    if near is not None:
        weight = (logs[rank, :, ranks * heads :] - total[:, rank]).exp_().unsqueeze(2)
        out[:, rank].addcmul_(near, weight)
    if cos_sin is not None:
        turn = cos_sin.index_select(0, positions).view(tokens, 1, 1, -1)
        turn_tail_(out, turn, inverse=True)
    return out.transpose(0, 1).to(q.dtype).contiguous()


def index_part(
    q: Tensor,
    g: Tensor,
    pages: EntryPages,
    page_table: Tensor,
    counts: Tensor,
    query_start: Tensor,
    *,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `ref.index_part`; all that a table has room for is scored and sorted."""
    tokens, heads, d = q.shape
    room = page_table.shape[1] * pages.entries
    sequence, real = owners(query_start, tokens)
    seen = torch.where(real, counts, 0).clamp_max(room).unsqueeze(1)  # [T, 1]
    every, place = (torch.arange(n, device=q.device) for n in (room, min(top_k, room)))
    found = torch.full((tokens, top_k), -1, dtype=torch.int32, device=q.device)
    values = torch.zeros(tokens, top_k, dtype=wide(q).dtype, device=q.device)
    step = max(1, BLOCK // (room * max(heads, d)))
    for low in range(0, tokens, step):
        rows = slice(low, low + step)
        numbers = torch.where(every < seen[rows], every, -1)  # [m, room]
        table = _tables(page_table, sequence[rows])
        keys = take(pages, locate(table, pages.entries, numbers).flatten()).view(-1, room, d)
        products = torch.bmm(wide(q[rows]), keys.to(values.dtype).transpose(1, 2)).relu_()
        value = torch.bmm(wide(g[rows]).unsqueeze(1).to(values.dtype), products).squeeze(1)
        value = value.mul_(scale).nan_to_num_(math.inf, math.inf, -math.inf)
        value.masked_fill_(numbers < 0, -math.inf)
        best = torch.sort(value, dim=1, descending=True, stable=True).indices[:, : len(place)]
        best = torch.where(place < seen[rows], best, room).sort(dim=1).values
        kept = best < room
        found[rows, : len(place)] = torch.where(kept, best, -1).int()
        picked = value.gather(1, best.clamp_max(room - 1))
        values[rows, : len(place)] = torch.where(kept, picked, 0.0)
    return found, values


def index_merge(found: Tensor, values: Tensor, *, rank: int) -> Tensor:
    """See `ref.index_merge`: a stable sort by score of what a sort by number left in order."""
    ranks, tokens, top_k = found.shape
    offset = torch.arange(ranks, device=found.device).view(-1, 1, 1)
    none = found < 0
    last = torch.iinfo(torch.int64).max
    numbers = torch.where(none, last, found.long() * ranks + offset)
    numbers, order = numbers.transpose(0, 1).reshape(tokens, -1).sort(dim=1)
    value = torch.where(none, -math.inf, values).transpose(0, 1).reshape(tokens, -1)
    best = value.gather(1, order).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = numbers.gather(1, best)
    own = torch.where((chosen < last) & (chosen % ranks == rank), chosen // ranks, last)
    own = own.sort(dim=1).values
    return torch.where(own < last, own, -1).int()
