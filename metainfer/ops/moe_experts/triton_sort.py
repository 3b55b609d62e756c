"""Pairs sorted by expert in one launch, as few as a decode step has: counts, borders, places.

Every program counts all pairs for itself, so that none waits for another; the work grows with the
square of the pairs, which is why more of them are sorted by the library.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs", "blocks"])
def sort_kernel(
    ids, order, table, tiles, bounds, pairs, blocks,
    E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, SLOTS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Program: SLOTS of the pairs. `order`: pairs by expert, then as they come; those of no expert
    (-1) are left out. TABLE: `table` [blocks, 3] holds expert, first place in `order` and count of
    each block of up to M pairs, 0 past the last; otherwise `bounds` [E + 1] holds the first place
    of each expert and `tiles` [E + 1] its first block."""
    program = tl.program_id(0)
    i = program * SLOTS + tl.arange(0, SLOTS)
    e = tl.arange(0, EP)
    mine = tl.load(ids + i, mask=i < pairs, other=-1)
    counts = tl.zeros([EP], tl.int32)
    rank = tl.zeros([SLOTS], tl.int32)
    for base in range(0, pairs, 32):
        j = base + tl.arange(0, 32)
        other = tl.load(ids + j, mask=j < pairs, other=-1)[None, :]
        counts += tl.sum((other == e[:, None]).to(tl.int32), axis=1)
        earlier = (other == mine[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(earlier.to(tl.int32), axis=1)
    filled = (counts + M - 1) // M
    first = tl.cumsum(counts, axis=0) - counts
    first_block = tl.cumsum(filled, axis=0) - filled
    own = mine[:, None] == e[None, :]
    place = tl.sum(tl.where(own, first[None, :], 0), axis=1) + rank
    tl.store(order + place, i.to(order.dtype.element_ty), mask=mine >= 0)
    if TABLE:
        block = tl.sum(tl.where(own, first_block[None, :], 0), axis=1) + rank // M
        total = tl.sum(tl.where(own, counts[None, :], 0), axis=1)
        head = (mine >= 0) & (rank % M == 0)
        tl.store(table + block * 3, mine, mask=head)
        tl.store(table + block * 3 + 1, place, mask=head)
        tl.store(table + block * 3 + 2, tl.minimum(total - rank, M), mask=head)
        used = tl.sum(filled, axis=0)
        for base in range(program * SLOTS, blocks, tl.num_programs(0) * SLOTS):
            b = base + tl.arange(0, SLOTS)
            tl.store(table + b * 3 + 2, 0, mask=(b >= used) & (b < blocks))
    elif program == 0:
        tl.store(bounds + e, first.to(bounds.dtype.element_ty), mask=e < E)
        tl.store(tiles + e, first_block.to(tiles.dtype.element_ty), mask=e < E)
        tl.store(bounds + E, tl.sum(counts, axis=0).to(bounds.dtype.element_ty))
        tl.store(tiles + E, tl.sum(filled, axis=0).to(tiles.dtype.element_ty))
