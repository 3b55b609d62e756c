"""The exact choice of a row's best entries from scores kept as whole numbers.

The top k of a row lie in the k groups whose largest come first (equal ones by place): each group
before another one holds an entry that comes before all of the other's. So one program a row
chooses groups, then entries of those, each by a search for the k-th highest number among values
that it holds in registers; equal entries go to the lower place.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(-(1 << 31))  # below every score
_MOST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _values(source, groups, listed, first, count, LANES: tl.constexpr, NEAR: tl.constexpr):
    """(numbers, their places) [LANES / NEAR, NEAR] in the `first` .. of `count` groups of a line;
    `listed`: of the groups that `groups` names."""
    i = first + tl.arange(0, LANES // NEAR)
    inside = i < count
    if listed:
        i = tl.load(groups + i, mask=inside, other=0)
    place = i[:, None] * NEAR + tl.arange(0, NEAR)[None, :]
    return tl.load(source + place, mask=inside[:, None], other=_LEAST), place


@triton.jit
def _reached(value, lower, upper):
    """How many are at least `lower`; and at least `upper`, times 2^16: one sum for both."""
    one = (value >= lower.to(tl.int32)).to(tl.int32)
    one += (value >= upper.to(tl.int32)).to(tl.int32) << 16
    return tl.sum(tl.sum(one, axis=1), axis=0)


@triton.jit
def _kth(source, groups, listed, count, k, LANES: tl.constexpr, NEAR: tl.constexpr):
    """(number, how many equal to it are taken): with all above it, exactly k. At least k exist.

    Each round tells three ranges apart by two counts; it ends early when one of them is k.
    """
    ROWS: tl.constexpr = LANES // NEAR
    value, _ = _values(source, groups, listed, 0, count, LANES, NEAR)
    high = tl.max(tl.max(value, axis=1), axis=0)
    low = tl.min(tl.min(tl.where(value == _LEAST, _MOST, value), axis=1), axis=0)
    for first in range(ROWS, count, ROWS):
        more, _ = _values(source, groups, listed, first, count, LANES, NEAR)
        high = tl.maximum(high, tl.max(tl.max(more, axis=1), axis=0))
        more = tl.where(more == _LEAST, _MOST, more)
        low = tl.minimum(low, tl.min(tl.min(more, axis=1), axis=0))
    high, low = high.to(tl.int64), low.to(tl.int64)
    above = tl.full([], 0, tl.int32)  # as many are higher than `high`
    while low < high:
        lower = low + tl.maximum(((high - low) * 5) >> 4, 1)
        upper = low + tl.maximum(((high - low) * 11) >> 4, 1)
        both = _reached(value, lower, upper)
        many, few = both & 0xFFFF, both >> 16
        for first in range(ROWS, count, ROWS):
            more, _ = _values(source, groups, listed, first, count, LANES, NEAR)
            both = _reached(more, lower, upper)
            many, few = many + (both & 0xFFFF), few + (both >> 16)
        if few == k:  # these, and nothing that equals the number below
            low, high, above = upper - 1, upper - 1, few
        elif many == k:
            low, high, above = lower - 1, lower - 1, many
        elif few > k:
            low = upper
        elif many > k:
            low, high, above = lower, upper - 1, few
        else:
            high, above = lower - 1, many
    return low.to(tl.int32), k - above


@triton.jit
def _take(
    source, groups, listed, count, k, out, LANES: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """The places of the k highest of `count` groups, rising: out [k]."""
    border, equals = _kth(source, groups, listed, count, k, LANES, NEAR)
    STEP: tl.constexpr = LANES // 2 if LANES > 2048 else LANES // 4  # registers
    higher = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for first in range(0, count, STEP // NEAR):
        value, place = _values(source, groups, listed, first, count, STEP, NEAR)
        value, place = tl.reshape(value, [STEP]), tl.reshape(place, [STEP])
        over, same = value > border, value == border
        # both counts up to here in one sum
        passed = tl.cumsum(over.to(tl.int32) + (same.to(tl.int32) << 16), axis=0)
        nth = equal + (passed >> 16)
        at = higher + (passed & 0xFFFF) + tl.minimum(nth, equals) - 1
        tl.store(out + at, place, mask=over | (same & (nth <= equals)))
        passed = tl.max(passed, axis=0)
        higher, equal = higher + (passed & 0xFFFF), equal + (passed >> 16)


@triton.jit(do_not_specialize=["sequences", "first", "ratio", "top_k", "room"])
def select_kernel(
    scores, largest, groups, positions, query_start, out, sequences, first, ratio, top_k, room,
    NEAR: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Row `first` + program: its `top_k` entries, rising, then -1. A line of `scores` holds 64 *
    `room` of them, one of `largest` a NEAR-th; `groups` [rows, top_k]."""
    line = tl.program_id(0).to(tl.int64)
    t = first + tl.program_id(0)
    mine = out + t.to(tl.int64) * top_k
    seen = ((tl.load(positions + t) + 1) // ratio).to(tl.int32)
    seen = tl.where(t < tl.load(query_start + sequences), seen, 0)
    if seen <= top_k:
        for begin in range(0, top_k, LANES):
            i = begin + tl.arange(0, LANES)
            tl.store(mine + i, tl.where(i < seen, i, -1), mask=i < top_k)
    else:
        count = tl.cdiv(seen, NEAR)
        kept = groups + line * top_k
        largest += line * room * (64 // NEAR)
        scores += line * room * 64
        narrowed = (seen > LANES) & (count > top_k)
        for turn in range(tl.where(narrowed, 0, 1), 2):  # groups, then entries
            if turn == 0:
                source, many, target = largest, tl.cdiv(count, NEAR), kept
            else:
                source, many, target = scores, tl.where(narrowed, top_k, count), mine
            _take(source, kept, narrowed & (turn == 1), many, top_k, target, LANES, NEAR)
            tl.debug_barrier()
