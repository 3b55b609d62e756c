"""Attention over one part of dealt keys and values in Triton: a query's keys are cut into splits.

Program (t, g, s) folds split s of what query t sees into a running softmax for all heads that read
cache head g; a second kernel adds the splits and leaves the mix and the logarithm of its sum. A
query finds its sequence by bisection of `query_start` on the device, so no length leaves it and
padding costs an empty loop. Products in the inputs' type with float32 sums (float32: exact).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.ops.attn_paged.tiles import SPLIT, rows_for, splits_for
from metainfer.ops.attn_paged.triton import LOG2E, _attend, _units
from metainfer.ops.dealt.empty import EMPTY
from metainfer.ops.strides import heads_packed

NOTHING = tl.constexpr(EMPTY)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["sequences", "table_stride"])
def part_kernel(
    q, k_cache, v_cache, parts, sums, peaks, table, counts, query_start, factor, sequences,
    q_stride, page_stride, token_stride, table_stride,
    HQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
    PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    token, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, right = 0, sequences
    while s < right:  # sequences that end before this query: the number of its own
        middle = (s + right) // 2
        if tl.load(query_start + middle + 1) <= token:
            s = middle + 1
        else:
            right = middle
    count = 0
    if s < sequences:
        count = tl.load(counts + token).to(tl.int32)
    share = tl.cdiv(tl.cdiv(count, N), SPLITS) * N
    low = split * share
    high = tl.minimum(low + share, count)
    row = tl.arange(0, M)
    live = row < GROUP
    lane = tl.arange(0, LANES)
    heads = head * GROUP + row
    tile = tl.load(
        q + token.to(tl.int64) * q_stride + (heads * D)[:, None] + lane[None, :],
        mask=live[:, None] & (lane < D)[None, :],
        other=0.0,
    )
    own = tl.zeros([M], tl.int32) + (count - 1)
    total = tl.zeros([M], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    mixed = tl.zeros([M, LANES], tl.float32)
    total, peak, mixed = _attend(
        tile, k_cache, v_cache, table + tl.cast(s, tl.int64) * table_stride, head, low, high,
        own, live, factor, 0, page_stride, token_stride, total, peak, mixed,
        D, LANES, PAGE, N, False, EXACT,
    )  # fmt: skip
    place = (token.to(tl.int64) * HQ + heads) * SPLITS + split  # [M]
    tl.store(sums + place, total, mask=live)
    tl.store(peaks + place, peak, mask=live)
    tl.store(parts + (place * LANES)[:, None] + lane[None, :], mixed, mask=live[:, None])


@triton.jit
def log_kernel(
    parts, sums, peaks, mixed, logs,
    HQ: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HQ + tl.program_id(1)
    split, lane = tl.arange(0, SPLITS), tl.arange(0, LANES)
    place = row * SPLITS + split
    peak = tl.load(peaks + place)
    top = tl.max(peak, axis=0)
    anchor = tl.where(top == float("-inf"), 0.0, top)  # no split has a key
    fade = tl.exp2(peak - anchor)
    total = tl.sum(tl.load(sums + place) * fade, axis=0)
    found = tl.load(parts + (place * LANES)[:, None] + lane[None, :])
    some = total > 0.0
    total = tl.where(some, total, 1.0)
    result = tl.sum(found * fade[:, None], axis=0) / total
    tl.store(mixed + row * D + lane, result, mask=lane < D)
    tl.store(logs + row, tl.where(some, (anchor + tl.log2(total)) * LN2, NOTHING))


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
    """See `ref.attn_paged_part`; q may have any token stride.

    The number of splits follows from shapes alone (queries, table width), never from lengths.
    """
    if not heads_packed(q):
        raise InternalError(f"attention wants packed query heads, got strides {q.stride()}")
    tokens, hq, d = q.shape
    page, hkv = k_cache.shape[1:3]
    mixed = torch.empty((tokens, hq, d), dtype=torch.float32, device=q.device)
    logs = torch.empty((tokens, hq), dtype=torch.float32, device=q.device)
    if tokens == 0:
        return mixed, logs
    group, lanes = hq // hkv, triton.next_power_of_2(d)
    longest = page_table.shape[1] * page
    splits = splits_for(tokens * hkv, triton.cdiv(longest, SPLIT.n), _units(q.device))
    parts = torch.empty((tokens, hq, splits, lanes), dtype=torch.float32, device=q.device)
    sums = torch.empty((tokens, hq, splits), dtype=torch.float32, device=q.device)
    peaks = torch.empty_like(sums)
    part_kernel[(tokens, hkv, splits)](
        q, k_cache, v_cache, parts, sums, peaks, page_table, counts, query_start, scale * LOG2E,
        query_start.shape[0] - 1, q.stride(0), k_cache.stride(0), k_cache.stride(1),
        page_table.stride(0), hq, group, d, lanes, page, rows_for(SPLIT, group), SPLIT.n,
        q.dtype == torch.float32, splits, num_warps=SPLIT.warps, num_stages=SPLIT.stages,
    )  # fmt: skip
    log_kernel[(tokens, hq)](parts, sums, peaks, mixed, logs, hq, d, lanes, splits, num_warps=4)
    return mixed, logs
