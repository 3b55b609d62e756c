"""Pairs sorted by expert, stably: counts, borders, places; and the plan of a decode step.

A program places the pairs of its share. It needs the counts of all pairs and of those before its
own: it counts for itself where pairs are few, so that none waits for another, and adds up what a
launch before has counted where they are many.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.moe_experts.sorting import SLOTS
from metainfer.ops.triton_parts import power

_SLOTS = tl.constexpr(SLOTS)


@triton.jit
def _pairs(ids, begin, pairs, COUNT: tl.constexpr):
    """Experts of COUNT pairs, -1 past the last."""
    i = begin + tl.arange(0, COUNT)
    return tl.load(ids + i, mask=i < pairs, other=-1)


@triton.jit(do_not_specialize=["pairs", "share"])
def count_kernel(ids, counts, pairs, share, EP: tl.constexpr):
    """Program: pairs of each expert among its ``share SLOTS``, into `counts` [programs, EP]."""
    program = tl.program_id(0)
    count = tl.zeros([EP], tl.int32)
    for step in range(0, share, 4):
        mine = _pairs(ids, (program * share + step) * _SLOTS, pairs, 4 * _SLOTS)
        count += tl.histogram(mine, EP, mask=mine >= 0)
    tl.store(counts + program * EP + tl.arange(0, EP), count)


@triton.jit
def _counts(ids, counts, begin, program, programs, pairs, EP: tl.constexpr, PAIRS: tl.constexpr):
    """Pairs of each expert [EP]: (before pair `begin`, where the program's share starts; all)."""
    if PAIRS:
        every = _pairs(ids, 0, pairs, PAIRS)
        total = tl.histogram(every, EP, mask=every >= 0)
        before = tl.zeros([EP], tl.int32)
        if PAIRS > _SLOTS:
            before = tl.histogram(every, EP, mask=(every >= 0) & (tl.arange(0, PAIRS) < begin))
    else:
        p, e = tl.arange(0, 64)[:, None], tl.arange(0, EP)[None, :]
        before = tl.zeros([EP], tl.int32)
        total = tl.zeros([EP], tl.int32)
        for base in range(0, programs, 64):
            part = tl.load(counts + (base + p) * EP + e, mask=base + p < programs, other=0)
            total += tl.sum(part, axis=0)
            before += tl.sum(tl.where(base + p < program, part, 0), axis=0)
    return before, total


@triton.jit
def _sort(
    ids, counts, order, table, tiles, bounds, pairs, blocks, share, program, programs,
    E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, PAIRS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """See `sort_kernel`; as program `program` of `programs`."""
    begin = program * share * _SLOTS
    before, total = _counts(ids, counts, begin, program, programs, pairs, EP, PAIRS)
    e = tl.arange(0, EP)
    filled = (total + M - 1) // M
    both = tl.cumsum(total.to(tl.int64) << 32 | filled, axis=0)  # one scan for both
    first, first_block = (both >> 32).to(tl.int32) - total, both.to(tl.int32) - filled
    free = first + before
    i = tl.arange(0, _SLOTS)
    mine = _pairs(ids, begin, pairs, _SLOTS)
    for step in range(share):
        ahead = _pairs(ids, begin + (step + 1) * _SLOTS, pairs, _SLOTS)
        known = mine >= 0
        # the sum runs down a thread's own column
        same = (mine[:, None] == mine[None, :]) & (i[:, None] < i[None, :])
        rank = tl.sum(same.to(tl.int32), axis=0)
        place = tl.gather(free, tl.where(known, mine, 0), axis=0) + rank
        pair = begin + step * _SLOTS + i
        tl.store(order + place, pair.to(order.dtype.element_ty), mask=known)
        if not PAIRS:
            free += tl.histogram(mine, EP, mask=known)
        mine = ahead
    if TABLE:
        for b in range(program, tl.max(filled, axis=0), programs):  # an expert's b-th block
            at = table + (first_block + b) * 3
            tl.store(at, e, mask=b < filled)
            tl.store(at + 1, first + b * M, mask=b < filled)
            tl.store(at + 2, tl.minimum(total - b * M, M), mask=b < filled)
        used = tl.sum(filled, axis=0)
        for base in range(used + program * _SLOTS, blocks, programs * _SLOTS):
            unused = base + tl.arange(0, _SLOTS)
            tl.store(table + unused * 3 + 2, 0, mask=unused < blocks)
    elif program == 0:
        tl.store(bounds + e, first.to(bounds.dtype.element_ty), mask=e < E)
        tl.store(tiles + e, first_block.to(tiles.dtype.element_ty), mask=e < E)
        tl.store(bounds + E, tl.sum(total, axis=0).to(bounds.dtype.element_ty))
        tl.store(tiles + E, tl.sum(filled, axis=0).to(tiles.dtype.element_ty))


@triton.jit(do_not_specialize=["pairs", "blocks", "share"])
def sort_kernel(
    ids, counts, order, table, tiles, bounds, pairs, blocks, share,
    E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, PAIRS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Program: ``share SLOTS`` of the pairs. `order`: pairs by expert, then as they come; those of
    no expert (-1) are left out. TABLE: `table` [blocks, 3] holds expert, first place in `order` and
    count of each block of up to M pairs, 0 past the last; otherwise `bounds` [E + 1] holds the
    first place of each expert and `tiles` [E + 1] its first block. PAIRS: not more than so many,
    counted here, share 1; 0: `counts` comes from `count_kernel` with the same share."""
    _sort(
        ids, counts, order, table, tiles, bounds, pairs, blocks, share, tl.program_id(0),
        tl.num_programs(0), E, EP, M, PAIRS, TABLE,
    )  # fmt: skip


@triton.jit
def _sort_few(ids, order, table, pairs, blocks, M: tl.constexpr, PAIRS: tl.constexpr):
    """As `_sort` with TABLE, in one program: each pair is compared with each."""
    i = tl.arange(0, PAIRS)
    mine = tl.load(ids + i, mask=i < pairs, other=-1)
    same = mine[:, None] == mine[None, :]
    less = (mine[:, None] < mine[None, :]) & (mine >= 0)[:, None]
    rank = tl.sum((same & (i[:, None] < i[None, :])).to(tl.int32), axis=0)
    total = tl.sum(same.to(tl.int32), axis=0)
    place = tl.sum(less.to(tl.int32), axis=0) + rank
    head = (rank % M == 0) & (mine >= 0)
    at = table + (tl.sum((less & head[:, None]).to(tl.int32), axis=0) + rank // M) * 3
    tl.store(order + place, i, mask=mine >= 0)
    tl.store(at, mine, mask=head)
    tl.store(at + 1, place, mask=head)
    tl.store(at + 2, tl.minimum(total - rank, M), mask=head)
    tl.store(table + i * 3 + 2, 0, mask=(i >= tl.sum(head.to(tl.int32))) & (i < blocks))


@triton.jit
def _largest(x):
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit(do_not_specialize=["rows", "pairs", "blocks"])
def plan_kernel(
    x, q, scales, ids, order, table, rows, x_stride, pairs, blocks,
    K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """The first programs sort the pairs as `sort_kernel` does (TABLE), SLOTS each; one more
    quantises a block of 128 channels of ROWS tokens in mixed order."""
    sorting: tl.constexpr = (PAIRS + _SLOTS - 1) // _SLOTS
    if tl.program_id(0) < sorting:
        if PAIRS < _SLOTS:
            _sort_few(ids, order, table, pairs, blocks, M, PAIRS)
        else:
            _sort(
                ids, ids, order, table, ids, ids, pairs, blocks, 1, tl.program_id(0), sorting,
                E, EP, M, PAIRS, True,
            )  # fmt: skip
    else:
        block = (tl.program_id(0) - sorting) % (K // 128)
        row = (tl.program_id(0) - sorting) // (K // 128) * ROWS + tl.arange(0, ROWS)
        live, col = row < rows, tl.arange(0, 128)
        at = row.to(tl.int64)[:, None]
        here = x + at * x_stride + block * 128 + col[None, :]
        values = tl.load(here, mask=live[:, None], other=0.0).to(tl.float32)
        scale, inverse = power(_largest(values))
        mixed = (col // 4 % 4) * 32 + col // 16 * 4 + col % 4
        rounded = (values * inverse[:, None]).to(q.dtype.element_ty)
        tl.store(q + at * K + block * 128 + mixed[None, :], rounded, mask=live[:, None])
        tl.store(scales + row * (K // 128) + block, scale, mask=live)
