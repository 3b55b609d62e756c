"""Paged attention in Triton: online softmax over key tiles, the heads of a group in one tile.

`attn_paged` serves any mixture of chunks and decodes: block b of the grid belongs to the sequence
whose first block is the last one <= b when sequence s starts at block ``query_start[s] // Q + s``
(a few blocks more than needed, found by bisection on the device, so no length leaves it).
`attn_decode` cuts the keys of each sequence into parts, one program each, and combines them.

Products in the inputs' type with float32 sums (float32 inputs: exact products), softmax in float32.
A page is read only inside its sequence's context and window. Numbers that vary by step are not
specialised on, so that no step compiles anything after warm-up.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.ops.attn_paged.tiles import (
    NARROW,
    SPLIT,
    prefers_wide,
    rows_for,
    splits_for,
    wide_for,
)
from metainfer.ops.strides import heads_packed

LOG2E = 1.4426950408889634


@triton.jit
def _attend(
    q, k_cache, v_cache, pages, head, low, high, own, live, factor, window,
    page_stride, token_stride, total, peak, mixed,
    D: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Fold keys [low, high) into the running softmax of the query rows at positions `own`."""
    lane = tl.arange(0, LANES)
    inside = (lane < D)[None, :]
    for start in range(low // N * N, high, N):
        at = start + tl.arange(0, N)  # [N] positions of keys
        held = (at >= low) & (at < high)
        page = tl.load(pages + at // PAGE, mask=held, other=0).to(tl.int64)
        place = page * page_stride + (at % PAGE) * token_stride + head * D
        where = place[:, None] + lane[None, :]
        keys = tl.load(k_cache + where, mask=held[:, None] & inside, other=0.0)  # [N, LANES]
        if EXACT:
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * factor  # [M, N]
        else:
            scores = tl.dot(q, tl.trans(keys)) * factor
        seen = live[:, None] & held[None, :] & (at[None, :] <= own[:, None])
        if WINDOW:
            seen = seen & (at[None, :] > own[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        above = tl.maximum(peak, tl.max(scores, axis=1))
        anchor = tl.where(above == float("-inf"), 0.0, above)  # a row that saw nothing yet
        weight = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(peak - anchor)
        total = total * fade + tl.sum(weight, axis=1)
        values = tl.load(v_cache + where, mask=held[:, None] & inside, other=0.0)
        if EXACT:
            mixed = mixed * fade[:, None] + tl.dot(weight, values, input_precision="ieee")
        else:
            mixed = tl.dot(weight.to(values.dtype), values, mixed * fade[:, None])
        peak = above
    return total, peak, mixed


@triton.jit(do_not_specialize=["sequences", "table_stride"])
def attn_kernel(
    q, k_cache, v_cache, out, table, query_start, context_lens, factor, sequences, window,
    q_stride, page_stride, token_stride, table_stride,
    HQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
    PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    QUERIES: tl.constexpr = M // GROUP
    left, right = 0, sequences
    while left < right:
        middle = (left + right) // 2
        if tl.load(query_start + middle) // QUERIES + middle <= block:
            left = middle + 1
        else:
            right = middle
    s = left - 1
    begin = tl.load(query_start + s)
    count = tl.load(query_start + s + 1) - begin
    first = (block - (begin // QUERIES + s)) * QUERIES  # of this block's queries, in the sequence
    if first < count:
        context = tl.load(context_lens + s)
        row = tl.arange(0, M)
        query = first + row // GROUP
        live = (row < QUERIES * GROUP) & (query < count)
        own = context - count + query
        lane = tl.arange(0, LANES)
        token = (begin + query).to(tl.int64)
        heads = (head * GROUP + row % GROUP) * D
        mask = live[:, None] & (lane < D)[None, :]
        tile = tl.load(
            q + (token * q_stride + heads)[:, None] + lane[None, :], mask=mask, other=0.0
        )
        high = context - count + tl.minimum(first + QUERIES, count)
        low = 0
        if WINDOW:
            low = tl.maximum(context - count + first - window + 1, 0)
        total = tl.zeros([M], tl.float32)
        peak = tl.full([M], float("-inf"), tl.float32)
        mixed = tl.zeros([M, LANES], tl.float32)
        total, peak, mixed = _attend(
            tile, k_cache, v_cache, table + s * table_stride, head, low, high,
            own, live, factor, window, page_stride, token_stride, total, peak, mixed,
            D, LANES, PAGE, N, WINDOW, EXACT,
        )  # fmt: skip
        result = mixed / tl.where(live, total, 1.0)[:, None]
        where = (token * (HQ * D) + heads)[:, None] + lane[None, :]
        tl.store(out + where, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride"])
def split_kernel(
    q, k_cache, v_cache, parts, sums, peaks, table, query_start, context_lens, factor, window,
    q_stride, page_stride, token_stride, table_stride,
    HQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
    PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr,
    EXACT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    s, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_start + s)
    if tl.load(query_start + s + 1) > begin:
        context = tl.load(context_lens + s)
        bottom = 0
        if WINDOW:
            bottom = tl.maximum(context - window, 0)
        base = bottom // N * N
        share = tl.cdiv(tl.cdiv(context - base, N), SPLITS) * N
        low = tl.maximum(base + split * share, bottom)
        high = tl.minimum(base + (split + 1) * share, context)
        row = tl.arange(0, M)
        live = row < GROUP
        lane = tl.arange(0, LANES)
        heads = head * GROUP + row
        mask = live[:, None] & (lane < D)[None, :]
        token = begin.to(tl.int64)
        tile = tl.load(
            q + token * q_stride + (heads * D)[:, None] + lane[None, :], mask=mask, other=0.0
        )
        own = tl.zeros([M], tl.int32) + (context - 1)
        total = tl.zeros([M], tl.float32)
        peak = tl.full([M], float("-inf"), tl.float32)
        mixed = tl.zeros([M, LANES], tl.float32)
        total, peak, mixed = _attend(
            tile, k_cache, v_cache, table + s.to(tl.int64) * table_stride, head, low, high,
            own, live, factor, window, page_stride, token_stride, total, peak, mixed,
            D, LANES, PAGE, N, WINDOW, EXACT,
        )  # fmt: skip
        place = (s.to(tl.int64) * HQ + heads) * SPLITS + split  # [M]
        tl.store(sums + place, total, mask=live)
        tl.store(peaks + place, peak, mask=live)
        tl.store(parts + (place * LANES)[:, None] + lane[None, :], mixed, mask=live[:, None])


@triton.jit
def combine_kernel(
    parts, sums, peaks, out, query_start,
    HQ: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    s, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(query_start + s)
    if tl.load(query_start + s + 1) > begin:
        split, lane = tl.arange(0, SPLITS), tl.arange(0, LANES)
        place = (s.to(tl.int64) * HQ + head) * SPLITS + split
        peak = tl.load(peaks + place)
        fade = tl.exp2(peak - tl.max(peak, axis=0))  # an empty part has peak -inf: 0
        total = tl.sum(tl.load(sums + place) * fade, axis=0)
        mixed = tl.load(parts + (place * LANES)[:, None] + lane[None, :])
        result = tl.sum(mixed * fade[:, None], axis=0) / total
        where = (begin.to(tl.int64) * HQ + head) * D + lane
        tl.store(out + where, result.to(out.dtype.element_ty), mask=lane < D)


@cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@cache
def _units(device: torch.device) -> int:
    """Multiprocessors; the interpreter's host has none and stands for a small card."""
    if device.type != "cuda":
        return 8
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


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
    """See `ref.attn_paged`; q may have any token stride."""
    if not heads_packed(q):
        raise InternalError(f"attention wants packed query heads, got strides {q.stride()}")
    tokens, hq, d = q.shape
    sequences, page, hkv = context_lens.shape[0], k_cache.shape[1], k_cache.shape[2]
    out = torch.empty((tokens, hq, d), dtype=q.dtype, device=q.device)
    if tokens == 0 or sequences == 0:
        return out
    group = hq // hkv
    wide = wide_for(_capability(q.device))
    tile = wide if prefers_wide(tokens, sequences, group, wide) else NARROW
    m = rows_for(tile, group)
    attn_kernel[(tokens // (m // group) + sequences, hkv)](
        q, k_cache, v_cache, out, page_table, query_start, context_lens, scale * LOG2E,
        sequences, window, q.stride(0), k_cache.stride(0), k_cache.stride(1), page_table.stride(0),
        hq, group, d, triton.next_power_of_2(d), page, m, tile.n, window > 0,
        q.dtype == torch.float32, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def attn_decode(
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
    """See `ref.attn_paged`; at most one query per sequence.

    The number of parts follows from shapes alone (sequences, table width), never from lengths.
    """
    if not heads_packed(q):
        raise InternalError(f"attention wants packed query heads, got strides {q.stride()}")
    tokens, hq, d = q.shape
    sequences, page, hkv = context_lens.shape[0], k_cache.shape[1], k_cache.shape[2]
    out = torch.empty((tokens, hq, d), dtype=q.dtype, device=q.device)
    if tokens == 0 or sequences == 0:
        return out
    group, lanes = hq // hkv, triton.next_power_of_2(d)
    longest = page_table.shape[1] * page
    if window:
        longest = min(longest, window)
    splits = splits_for(sequences * hkv, triton.cdiv(longest, SPLIT.n), _units(q.device))
    parts = torch.empty((sequences, hq, splits, lanes), dtype=torch.float32, device=q.device)
    sums = torch.empty((sequences, hq, splits), dtype=torch.float32, device=q.device)
    peaks = torch.empty_like(sums)
    split_kernel[(sequences, hkv, splits)](
        q, k_cache, v_cache, parts, sums, peaks, page_table, query_start, context_lens,
        scale * LOG2E, window, q.stride(0), k_cache.stride(0), k_cache.stride(1),
        page_table.stride(0), hq, group, d, lanes, page, rows_for(SPLIT, group), SPLIT.n,
        window > 0, q.dtype == torch.float32, splits,
        num_warps=SPLIT.warps, num_stages=SPLIT.stages,
    )  # fmt: skip
    combine_kernel[(sequences, hq)](
        parts, sums, peaks, out, query_start, hq, d, lanes, splits, num_warps=4
    )
    return out
