"""The exact choice of a row's best entries from scores kept as whole numbers.

The top k of a row lie in the k groups whose largest come first (equal ones by place): each group
before another one holds an entry that comes before all of the other's. So one program a row
chooses groups of groups, groups of those, entries of those, as many steps as the row is long, each
by a search for the k-th highest number among values that it holds in registers. Equal entries go
to the lower place; a few groups more than k do no harm, so that their search may end early.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(-(1 << 31))  # below every score
_MOST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _values(
    source, groups, listed, first, count, total, LANES: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """(numbers, their places) [LANES / NEAR, NEAR] in the `first` .. of `count` groups of a line of
    `total`; `listed`: of the groups that `groups` names."""
    i = first + tl.arange(0, LANES // NEAR)
    inside = i < count
    if listed:
        i = tl.load(groups + i, mask=inside, other=0)
    place = i[:, None] * NEAR + tl.arange(0, NEAR)[None, :]
    value = tl.load(source + place, mask=inside[:, None], other=_LEAST)
    return tl.where(place < total, value, _LEAST), place


@triton.jit
def _reached(value, lower, upper):
    """How many are at least `lower`; and at least `upper`, times 2^16: one sum for both."""
    one = (value >= lower.to(tl.int32)).to(tl.int32)
    one += (value >= upper.to(tl.int32)).to(tl.int32) << 16
    return tl.sum(tl.sum(one, axis=1), axis=0)


@triton.jit
def _ends(value, low, high):
    """(least number from `low` on, greatest up to `high`)."""
    bottom = tl.where(value >= low.to(tl.int32), value, _MOST)
    top = tl.where(value <= high.to(tl.int32), value, _LEAST)
    return tl.min(tl.min(bottom, axis=1), axis=0), tl.max(tl.max(top, axis=1), axis=0)


@triton.jit
def _kth(
    source, groups, listed, count, total, k, most, LANES: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """(number, how many are above it): with some of its equals k, or k to `most` above it.

    Each round tells three ranges apart by two counts; now and then the range shrinks to the numbers
    that there are, so that ties end it. At least k exist.
    """
    ROWS: tl.constexpr = LANES // NEAR
    value, _ = _values(source, groups, listed, 0, count, total, LANES, NEAR)
    low = tl.full([], _LEAST + 1, tl.int64)
    high = tl.full([], _MOST, tl.int64)
    above = tl.full([], 0, tl.int32)  # as many are higher than `high`
    turn = 0
    while low < high:
        if turn % 6 == 0:
            bottom, top = _ends(value, low, high)
            for first in range(ROWS, count, ROWS):
                more, _ = _values(source, groups, listed, first, count, total, LANES, NEAR)
                least, greatest = _ends(more, low, high)
                bottom, top = tl.minimum(bottom, least), tl.maximum(top, greatest)
            low, high = bottom.to(tl.int64), top.to(tl.int64)
        else:
            lower = low + tl.maximum(((high - low) * 5) >> 4, 1)
            upper = low + tl.maximum(((high - low) * 11) >> 4, 1)
            both = _reached(value, lower, upper)
            many, few = both & 0xFFFF, both >> 16
            for first in range(ROWS, count, ROWS):
                more, _ = _values(source, groups, listed, first, count, total, LANES, NEAR)
                both = _reached(more, lower, upper)
                many, few = many + (both & 0xFFFF), few + (both >> 16)
            if (few >= k) & (few <= most):  # these, and nothing that equals the number below
                low, high, above = upper - 1, upper - 1, few
            elif (many >= k) & (many <= most):
                low, high, above = lower - 1, lower - 1, many
            elif few > k:
                low = upper
            elif many > k:
                low, high, above = lower, upper - 1, few
            else:
                high, above = lower - 1, many
        turn += 1
    return low.to(tl.int32), above


@triton.jit
def _take(
    source, groups, listed, count, total, k, most, out, LANES: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """The places of the k (up to `most`) highest of `count` groups, rising: out. How many."""
    border, above = _kth(source, groups, listed, count, total, k, most, LANES, NEAR)
    equals = tl.maximum(k - above, 0)
    STEP: tl.constexpr = LANES // 2 if LANES > 2048 else LANES // 4  # registers
    higher = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for first in range(0, count, STEP // NEAR):
        value, place = _values(source, groups, listed, first, count, total, STEP, NEAR)
        value, place = tl.reshape(value, [STEP]), tl.reshape(place, [STEP])
        over, same = value > border, value == border
        # both counts up to here in one sum
        passed = tl.cumsum(over.to(tl.int32) + (same.to(tl.int32) << 16), axis=0)
        nth = equal + (passed >> 16)
        at = higher + (passed & 0xFFFF) + tl.minimum(nth, equals) - 1
        tl.store(out + at, place, mask=over | (same & (nth <= equals)))
        passed = tl.max(passed, axis=0)
        higher, equal = higher + (passed & 0xFFFF), equal + (passed >> 16)
    return tl.maximum(above, k)


@triton.jit(do_not_specialize=["sequences", "first", "ratio", "top_k", "room", "keep"])
def select_kernel(
    scores, largest, greatest, lists, positions, query_start, out, sequences, first, ratio, top_k,
    room, keep, NEAR: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Row `first` + program: its `top_k` entries, rising, then -1. A line of `scores` holds 512 *
    `room` of them, one of `largest` their groups', one of `greatest` those groups' groups';
    `lists` [rows, 2, keep] of groups chosen, keep >= top_k."""
    FEW: tl.constexpr = 2048
    line = tl.program_id(0).to(tl.int64)
    t = first + tl.program_id(0)
    mine = out + t.to(tl.int64) * top_k
    seen = ((tl.load(positions + t) + 1) // ratio).to(tl.int32)
    seen = tl.where(t < tl.load(query_start + sequences), seen, 0)
    scores += line * room * 512
    groups, wide = tl.cdiv(seen, NEAR), tl.cdiv(seen, NEAR * NEAR)
    if seen <= top_k:
        for begin in range(0, top_k, LANES):
            i = begin + tl.arange(0, LANES)
            tl.store(mine + i, tl.where(i < seen, i, -1), mask=i < top_k)
    elif (seen <= FEW) & (LANES > FEW):
        _take(scores, lists, False, groups, seen, top_k, top_k, mine, FEW, NEAR)
    else:
        lists += line * 2 * keep
        largest += line * room * (512 // NEAR)
        greatest += line * room * (512 // NEAR // NEAR)
        steps = 0
        if (seen > LANES) & (groups > top_k):
            steps = 1
            if (groups > LANES) & (wide > top_k):
                steps = 2
        listed = tl.full([], -1, tl.int32)
        for step in range(2 - steps, 3):
            if step == 0:
                source, total, most, target = greatest, wide, keep, lists
            elif step == 1:
                source, total, most, target = largest, groups, keep, lists + keep
            else:
                source, total, most, target = scores, seen, top_k, mine
            count = tl.where(listed < 0, tl.cdiv(total, NEAR), listed)
            chosen = lists + tl.where(step == 2, keep, 0)
            listed = _take(
                source, chosen, listed >= 0, count, total, top_k, most, target, LANES, NEAR
            )
            tl.debug_barrier()
