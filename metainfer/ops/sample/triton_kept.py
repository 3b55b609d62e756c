"""Draws from what top-k and top-p keep. `draw_kernel` found bins that hold all of it:
`gather_kernel` lists their ids in rising order, and `choose_kernel`, one program a row, searches
the list for the k-th number, then for the number at which the mass above reaches top-p, and
inverts the distribution. A kept set is always "above a number, or equal to it up to a place of the
list": the lower id wins among equals.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.sample.triton import (
    LEAST,
    bin_of,
    edge_of,
    filters,
    least_of,
    logits_at,
    tempered,
    uniform,
    value_of,
)
from metainfer.ops.triton_order import ordered


@triton.jit(do_not_specialize=["vocab", "stride"])
def gather_kernel(
    logits, best, temperature, offsets, limits, numbers, ids, vocab, stride,
    PART: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the part's ids and numbers into the row's list."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = tl.load(limits + row)
    if limit >= 0:
        i = part * PART + tl.arange(0, PART)
        heat = tl.load(temperature + row)
        x = logits_at(logits, row, stride, i, vocab)
        hot = tempered(x, tl.load(best + row), heat, PART)
        inside = (i < vocab) & (bin_of(hot, BINS) <= limit)
        first = tl.load(offsets + row * (tl.num_programs(1) + 1) + part)
        place = row * vocab + first + tl.cumsum(inside.to(tl.int32), axis=0) - 1
        tl.store(numbers + place, ordered(hot), mask=inside)
        tl.store(ids + place, i, mask=inside)


@triton.jit
def _at(source, first, count, LANES: tl.constexpr):
    """(numbers of LANES places from `first` on, the places)."""
    i = first + tl.arange(0, LANES)
    return tl.load(source + i, mask=i < count, other=LEAST), i


@triton.jit
def _weights(weights, number, i, border, limit, count):
    """Weights of what is kept, 0 of others."""
    kept = (number > border) | ((number == border) & (i <= limit))
    return tl.load(weights + i, mask=kept & (i < count), other=0.0)


@triton.jit
def _equal_up_to(numbers, count, border, equals, LANES: tl.constexpr):
    """The place of the `equals`-th number equal to `border`; `count` where there are fewer."""
    limit = count
    passed, first = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    while (first < count) & (passed < equals):
        number, i = _at(numbers, first, count, LANES)
        equal = (number == border).to(tl.int32)
        nth = passed + tl.cumsum(equal, axis=0)
        limit = tl.minimum(
            limit, tl.min(tl.where((number == border) & (nth == equals), i, count), axis=0)
        )
        passed += tl.sum(equal, axis=0)
        first += LANES
    return tl.where(equals > 0, limit, -1)


@triton.jit
def _edge(number):
    """About the highest number of a bin, int64: a place to split at first."""
    return ordered(edge_of(number).to(tl.float32)).to(tl.int64)


@triton.jit
def _of_top_k(numbers, count, k, last, LANES: tl.constexpr):
    """(border, limit) of the k highest of more than k; the border is in the bin `last`."""
    top = tl.full([LANES], LEAST, tl.int32)
    bottom = tl.full([LANES], 0x7FFFFFFF, tl.int32)
    for first in range(0, count, LANES):
        number, i = _at(numbers, first, count, LANES)
        top = tl.maximum(top, number)
        bottom = tl.minimum(bottom, tl.where(i < count, number, 0x7FFFFFFF))
    high, low = tl.max(top, axis=0).to(tl.int64), tl.min(bottom, axis=0).to(tl.int64)
    above = tl.full([], 0, tl.int64)  # as many are higher than `high`
    middle = tl.minimum(tl.maximum(_edge(last), low + 1), high)
    while low < high:
        found = tl.zeros([LANES], tl.int32)
        for first in range(0, count, LANES):
            number, i = _at(numbers, first, count, LANES)
            found += (number >= middle.to(tl.int32)).to(tl.int32)
        reached = tl.sum(found, axis=0).to(tl.int64)
        if reached == k:  # these, and nothing that equals the number below
            low, high, above = middle - 1, middle - 1, reached
        elif reached > k:
            low = middle
        else:
            high, above = middle - 1, reached
        middle = low + (high - low + 1) // 2
    border = low.to(tl.int32)
    return border, _equal_up_to(numbers, count, border, k - above, LANES)


@triton.jit
def _of_top_p(numbers, weights, count, border, limit, mass, last, LANES: tl.constexpr):
    """(border, limit) of the shortest run of best ids, out of the kept, whose weight reaches
    `mass`; the best one is 0, the number of a quotient of 0, and stays. The border is probably in
    the bin `last` or soon above."""
    low, high = border.to(tl.int64), tl.full([], 0, tl.int64)
    over = tl.full([], 0.0, tl.float64)  # the weight of what is higher than `high`
    middle, jump = tl.maximum(_edge(last), low), tl.full([], 1, tl.int32)
    while low < high:
        split = tl.minimum(middle, high - 1).to(tl.int32)
        found = tl.zeros([LANES], tl.float64)
        below = tl.full([LANES], LEAST, tl.int32)
        above = tl.full([LANES], 0, tl.int32)
        for first in range(0, count, LANES):
            number, i = _at(numbers, first, count, LANES)
            weight = _weights(weights, number, i, border, limit, count)
            found += tl.where(number > split, weight, 0.0)
            below = tl.maximum(below, tl.where(number > split, LEAST, number))
            above = tl.minimum(above, tl.where(number > split, number, 0))
        reached = tl.sum(found, axis=0)
        if reached < mass:  # numbers between `below` and `split` do not occur
            high = tl.maximum(tl.max(below, axis=0).to(tl.int64), low)
            over = reached
            last = tl.full([], -1, tl.int32)
        else:
            low = tl.min(above, axis=0).to(tl.int64)
            last -= jump
            jump *= 2
        middle = low + (high - low) // 2
        if last >= 0:
            middle = tl.maximum(_edge(last), low)
    edge = high.to(tl.int32)
    needed = (mass - over) / tl.exp(value_of(edge).to(tl.float64))
    equals = tl.minimum(tl.maximum(needed, 1.0), count.to(tl.float64))
    whole = equals.to(tl.int64)
    whole += (whole.to(tl.float64) < equals).to(tl.int64)
    found_limit = _equal_up_to(numbers, count, edge, whole, LANES)
    return edge, tl.where(edge == border, tl.minimum(found_limit, limit), found_limit)


@triton.jit
def _total(numbers, weights, count, border, limit, least, LANES: tl.constexpr):
    """The weight of what is kept and weighs at least `least`."""
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, count, LANES):
        number, i = _at(numbers, first, count, LANES)
        weight = _weights(weights, number, i, border, limit, count)
        total += tl.sum(tl.where(weight < least, 0.0, weight), axis=0)
    return total


@triton.jit
def _inverted(numbers, weights, count, border, limit, least, point, LANES: tl.constexpr):
    """The first place at which the running sum exceeds `point`; the last that weighs where rounding
    puts the point on the total."""
    running = tl.full([], 0.0, tl.float64)
    found, last = count, tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    while (first < count) & (found == count):
        number, i = _at(numbers, first, count, LANES)
        weight = _weights(weights, number, i, border, limit, count)
        weight = tl.where(weight < least, 0.0, weight)
        sums = running + tl.cumsum(weight, axis=0)
        found = tl.min(tl.where((sums > point) & (weight > 0.0), i, count), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, i, 0), axis=0))
        running += tl.sum(weight, axis=0)
        first += LANES
    return tl.where(found == count, last, found)


@triton.jit(do_not_specialize=["vocab", "parts", "has_k", "has_p", "has_min"])
def choose_kernel(
    top_k, top_p, min_p, seed, index, sums, offsets, limits, numbers, ids, weights, tokens,
    vocab, parts, has_k, has_p, has_min, PARTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (row): the drawn id of a row with top-k or top-p. `weights` is its workspace."""
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(limits + row)
    if last >= 0:
        k, p = filters(top_k, top_p, row, vocab, has_k, has_p)
        numbers += row * vocab
        weights += row * vocab
        count = tl.load(offsets + row * (parts + 1) + parts)
        for first in range(0, count, LANES):
            number, i = _at(numbers, first, count, LANES)
            tl.store(weights + i, tl.exp(value_of(number).to(tl.float64)), mask=i < count)
        tl.debug_barrier()
        border, limit = tl.full([], LEAST, tl.int32), count
        if (k > 0) & (k < count):
            border, limit = _of_top_k(numbers, count, k, last, LANES)
        if p < 1.0:
            if k > 0:
                mass = _total(numbers, weights, count, border, limit, 0.0, LANES)
            else:
                at = tl.arange(0, PARTS)
                held = tl.load(sums + row * parts + at, mask=at < parts, other=0.0)
                mass = tl.sum(held, axis=0)
            mass = mass * p.to(tl.float64)
            border, limit = _of_top_p(numbers, weights, count, border, limit, mass, last, LANES)
        least = least_of(min_p, row, has_min)
        total = _total(numbers, weights, count, border, limit, least, LANES)
        point = uniform(tl.load(seed + row), tl.load(index + row)) * total
        place = _inverted(numbers, weights, count, border, limit, least, point, LANES)
        tl.store(tokens + row, tl.load(ids + row * vocab + place).to(tl.int64))
