"""Window and chosen entries in one softmax with a sink; shared keys and values; inverse rope."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, gather, locate
from metainfer.ops.common import rotate_tail, wide
from metainfer.ops.compress.ref import visible_entries


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
    """Attention of every query over its window and its compressed entries: [T, Hq, D].

    q [T, Hq, D], rotated; local_table, entry_table [S, W] int32; selected [T, k] int32, -1 for
    none, or None for all visible ones; sinks [Hq]; cos_sin [M, R] float32; positions [T] int64;
    query_start [S + 1], context_lens [S] int32. Rows after the last sequence are zero.
    """
    out = torch.zeros_like(q)
    starts = query_start.tolist()
    for s, context in enumerate(context_lens.tolist()):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        own = positions[begin:end]
        near = torch.arange(max(0, context - (end - begin) - window + 1), context, device=q.device)
        keys = [gather(local, locate(local_table[s], local.entries, near))]
        masks = [(near <= own.unsqueeze(1)) & (near > own.unsqueeze(1) - window)]
        if entries is not None and entry_table is not None and ratio:
            picked = None if selected is None else selected[begin:end]
            mask = chosen(own, picked, context // ratio, ratio)
            used = mask.any(dim=0).nonzero().squeeze(1)
            keys.append(gather(entries, locate(entry_table[s], entries.entries, used)))
            masks.append(mask[:, used])
        mixed = _attend(wide(q[begin:end]), torch.cat(keys), torch.cat(masks, dim=1), sinks, scale)
        out[begin:end] = rotate_tail(mixed, cos_sin[own].unsqueeze(1), inverse=True).to(q.dtype)
    return out


def chosen(own: Tensor, selected: Tensor | None, total: int, ratio: int) -> Tensor:
    """Which of `total` entries each query at positions `own` [n] attends to: bool [n, total]."""
    if selected is None:
        every = torch.arange(total, device=own.device)
        return every < visible_entries(own, ratio).unsqueeze(1)
    mask = torch.zeros(own.shape[0], total + 1, dtype=torch.bool, device=own.device)
    mask.scatter_(1, selected.long().masked_fill(selected < 0, total), True)
    return mask[:, :total]


def _attend(q: Tensor, keys: Tensor, mask: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """q [n, Hq, D], keys [L, D], mask [n, L], sinks [Hq] -> [n, Hq, D]."""
    keys = keys.to(q.dtype)
    logits = (q @ keys.T * scale).masked_fill(~mask.unsqueeze(1), float("-inf"))  # [n, Hq, L]
    sink = sinks.to(q.dtype).expand(q.shape[0], -1).unsqueeze(-1)
    weights = torch.softmax(torch.cat((logits, sink), dim=-1), dim=-1)
    return weights[..., :-1] @ keys
