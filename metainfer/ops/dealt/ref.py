"""Parts of attention with the logarithm of their sums, their merge, and a choice over parts."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, gather, locate
from metainfer.ops.attn_paged.ref import gather as gather_rows
from metainfer.ops.common import rotate_tail, wide
from metainfer.ops.dealt.empty import EMPTY
from metainfer.ops.indexer.ref import scores


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
    """Attention of every query over the listed entries of its sequence alone.

    q [T, Hq, D]; page_table [S, W] int32; listed [T, k] int32, then negative for none; sinks [Hq]
    or None; query_start [S + 1] int32. Gives the mix [T, Hq, D] and
    ``log sum e^l`` [T, Hq], the sink's term included, float32 (float64 in float64). A row without
    keys has a mix of 0, and `EMPTY` where it has no sink either. Rows after the last sequence too.
    """
    wide_q = wide(q)
    mixed, logs = torch.zeros_like(wide_q), wide_q.new_full(q.shape[:2], EMPTY)
    starts = query_start.tolist()
    for s in range(len(starts) - 1):
        for row in range(starts[s], starts[s + 1]):
            numbers = listed[row][listed[row] >= 0].long()
            keys = gather(pages, locate(page_table[s], pages.entries, numbers)).to(wide_q.dtype)
            logits = wide_q[row] @ keys.T * scale  # [Hq, L]
            if sinks is not None:
                logits = torch.cat((logits, sinks.to(logits.dtype).unsqueeze(1)), dim=1)
            if logits.shape[1]:
                logs[row] = torch.logsumexp(logits, dim=1)
                weights = (logits - logs[row].unsqueeze(1)).exp()
                mixed[row] = weights[:, : len(keys)] @ keys
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
    """As `attn_part`, over the first ``counts[t]`` keys of its sequence's pages.

    q [T, Hq, D]; caches [P, G, Hkv, D]; page_table [S, W] int32; counts [T] int64.
    """
    wide_q = wide(q)
    mixed, logs = torch.zeros_like(wide_q), wide_q.new_full(q.shape[:2], EMPTY)
    starts, group = query_start.tolist(), q.shape[1] // k_cache.shape[2]
    for s in range(len(starts) - 1):
        for row in range(starts[s], starts[s + 1]):
            count = int(counts[row])
            if not count:
                continue
            keys, values = (
                gather_rows(cache, page_table[s], 0, count).to(wide_q.dtype)
                .repeat_interleave(group, 1)
                for cache in (k_cache, v_cache)
            )  # fmt: skip
            logits = torch.einsum("hd,khd->hk", wide_q[row], keys) * scale
            logs[row] = torch.logsumexp(logits, dim=1)
            weights = (logits - logs[row].unsqueeze(1)).exp()
            mixed[row] = torch.einsum("hk,khd->hd", weights, values)
    return mixed, logs


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
    """This rank's share of every rank's output: [N, T, h, D] in the type of `q`; the sum over ranks
    of block r is attention of rank r's heads.

    q [T, h, D]; mixed [T, N h, D], wide: over this rank's part of the cache, heads of all ranks;
    logs [N, T, N h (+ h)], wide: of every rank's part, and of what each holds of its own heads
    beside it, whose mix is `near` [T, h, D]. `cos_sin` [M, R]: the last R channels are turned back
    by `positions` [T].
    """
    ranks, (tokens, heads, width) = logs.shape[0], q.shape
    every = logs[..., : ranks * heads].reshape(ranks, tokens, ranks, heads)
    total = torch.logsumexp(every, dim=0)  # [T, N, h]
    if near is not None:
        beside = logs[..., ranks * heads :].transpose(0, 1)  # [T, N, h]
        total = torch.logaddexp(total, beside)
    shares = (every[rank] - total).exp().unsqueeze(3)
    out: Tensor = mixed.view(tokens, ranks, heads, width) * shares
    if near is not None:
        weight = (beside[:, rank] - total[:, rank]).exp().unsqueeze(2)
        out[:, rank] += near * weight
    if cos_sin is not None:
        out = rotate_tail(out, cos_sin[positions][:, None, None], inverse=True)
    return out.transpose(0, 1).contiguous().to(q.dtype)


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
    """The `top_k` best of the first ``counts[t]`` entries of each query, rising, then -1
    [T, top_k] int32, and their scores, 0 where there is none [T, top_k], float32 (float64).

    q [T, H, d]; g [T, H]; page_table [S, W] int32; counts [T] int64; query_start [S + 1] int32.
    """
    found = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    values = torch.zeros(found.shape, dtype=wide(q).dtype, device=q.device)
    starts = query_start.tolist()
    for s in range(len(starts) - 1):
        for row in range(starts[s], starts[s + 1]):
            numbers = torch.arange(int(counts[row]), device=q.device)
            keys = gather(pages, locate(page_table[s], pages.entries, numbers))
            value = scores(q[row : row + 1], g[row : row + 1], keys, scale)[0]
            best = torch.sort(value, descending=True, stable=True).indices[:top_k].sort().values
            found[row, : len(best)] = best.int()
            values[row, : len(best)] = value[best].to(values.dtype)
    return found, values


def index_merge(found: Tensor, values: Tensor, *, rank: int) -> Tensor:
    """Of the best of all ranks those that this rank holds, by its own numbers, rising, then -1:
    [T, k] int32.

    found [N, T, k] int32 and values [N, T, k] of `index_part`: entry n of rank r is number
    ``n N + r`` of the sequence. Equal scores go to the lower number.
    """
    ranks, tokens, top_k = found.shape
    out = torch.full((tokens, top_k), -1, dtype=torch.int32, device=found.device)
    for row in range(tokens):
        offered = [
            (-float(values[r, row, i]), int(n) * ranks + r)
            for r in range(ranks)
            for i, n in enumerate(found[r, row].tolist())
            if n >= 0
        ]
        best = sorted(offered)[:top_k]
        own = sorted(number // ranks for _, number in best if number % ranks == rank)
        out[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
    return out
