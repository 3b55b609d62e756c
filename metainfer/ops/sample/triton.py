"""Sampling on the device in two launches, without a question to the host.

Logits are compared as whole numbers that order as they do. `best_kernel` finds the best id of each
row, all that greedy rows need. `draw_kernel` writes the tempered logits as such numbers and their
weights in float64; the last program of a row to arrive searches the k-th number, then the number
at which the mass above reaches top-p, and inverts the distribution over rising ids. A kept set is
always "above a number, or equal to it up to an id": the lower id wins among equals.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(-(1 << 31))  # below every number


@triton.jit
def _ordered(x):
    """float32 as whole numbers in its order: NaN above infinity, one zero."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, bits, 0x7FFFFFFF)


@triton.jit
def _value(number):
    """The float32 behind a number that `_ordered` gave."""
    bits = tl.where(number < 0, number ^ 0x7FFFFFFF, number)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _last(counters, row):
    """Whether this program is the row's last to arrive; what the others stored is then there."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + row, 1, sem="acq_rel")
    return arrived == tl.num_programs(1) - 1


@triton.jit(do_not_specialize=["vocab", "stride", "zero"])
def best_kernel(
    logits, parts, counters, best, tokens, bad, vocab, stride, zero,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (row, part). `tokens`: the first id of the highest logit (NaN is the highest), 0 for
    a bad row if `zero`; `bad`: that logit is not finite; `best`: it. PARTS: lanes for all parts."""
    row, part = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    line = logits + row.to(tl.int64) * stride
    number = _ordered(tl.load(line + i, mask=i < vocab, other=0.0).to(tl.float32))
    key = (number.to(tl.int64) << 32) + (vocab - 1 - i)
    key = tl.max(tl.where(i < vocab, key, _LEAST * (1 << 32)), axis=0)
    mine = parts + row.to(tl.int64) * tl.num_programs(1)
    tl.store(mine + part, key)
    if _last(counters, row):
        tl.store(counters + row, 0)
        p = tl.arange(0, PARTS)
        found = tl.load(
            mine + p, mask=p < tl.num_programs(1), other=_LEAST * (1 << 32), cache_modifier=".cg"
        )
        highest = tl.max(found, axis=0)
        value = _value((highest >> 32).to(tl.int32))
        token = vocab - 1 - (highest & 0xFFFFFFFF)
        broken = (value != value) | (tl.abs(value) == float("inf"))
        tl.store(best + row, value)
        tl.store(bad + row, broken)
        tl.store(tokens + row, tl.where(broken & (zero > 0), 0, token))


@triton.jit
def _shifted(x, count: tl.constexpr):
    """To the right, zeros from the left."""
    return (x >> count) & ((1 << (64 - count)) - 1)


@triton.jit
def _mix(x):
    x = (x ^ _shifted(x, 30)) * -4658895280553007687
    x = (x ^ _shifted(x, 27)) * -7723592293110705685
    return x ^ _shifted(x, 31)


@triton.jit
def _uniform(seed, index):
    """`draw.uniform`, to the bit."""
    inner = _mix(seed + -7046029254386353131)
    bits = _mix(inner + index * -7046029254386353131 + -4658895280553007687)
    return _shifted(bits, 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _at(source, first, count, LANES: tl.constexpr):
    """(numbers of LANES ids from `first` on, the ids)."""
    i = first + tl.arange(0, LANES)
    return tl.load(source + i, mask=i < count, other=_LEAST, cache_modifier=".cg"), i


@triton.jit
def _weights(weights, number, i, border, limit, count):
    """Weights of the ids that are kept, 0 of others."""
    kept = (number > border) | ((number == border) & (i <= limit))
    return tl.load(weights + i, mask=kept & (i < count), other=0.0, cache_modifier=".cg")


@triton.jit
def _equal_up_to(numbers, count, border, equals, LANES: tl.constexpr):
    """The id of the `equals`-th number equal to `border`; `count` where there are fewer."""
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
def _of_top_k(numbers, count, k, LANES: tl.constexpr):
    """(border, limit) of the k highest of more than k."""
    top = tl.full([LANES], _LEAST, tl.int32)
    bottom = tl.full([LANES], 0x7FFFFFFF, tl.int32)
    for first in range(0, count, LANES):
        number, i = _at(numbers, first, count, LANES)
        top = tl.maximum(top, number)
        bottom = tl.minimum(bottom, tl.where(i < count, number, 0x7FFFFFFF))
    high, low = tl.max(top, axis=0).to(tl.int64), tl.min(bottom, axis=0).to(tl.int64)
    above = tl.full([], 0, tl.int64)  # as many are higher than `high`
    while low < high:
        middle = low + (high - low + 1) // 2
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
    border = low.to(tl.int32)
    return border, _equal_up_to(numbers, count, border, k - above, LANES)


@triton.jit
def _of_top_p(numbers, weights, count, border, limit, mass, LANES: tl.constexpr):
    """(border, limit) of the shortest run of best ids, out of the kept, whose weight reaches
    `mass`; the best one is 0, the number of a quotient of 0, and stays."""
    low, high = border.to(tl.int64), tl.full([], 0, tl.int64)
    over = tl.full([], 0.0, tl.float64)  # the weight of what is higher than `high`
    while low < high:
        middle = low + (high - low) // 2
        split = middle.to(tl.int32)
        found = tl.zeros([LANES], tl.float64)
        below = tl.full([LANES], _LEAST, tl.int32)
        above = tl.full([LANES], 0, tl.int32)
        for first in range(0, count, LANES):
            number, i = _at(numbers, first, count, LANES)
            weight = _weights(weights, number, i, border, limit, count)
            found += tl.where(number > split, weight, 0.0)
            below = tl.maximum(below, tl.where(number > split, _LEAST, number))
            above = tl.minimum(above, tl.where(number > split, number, 0))
        reached = tl.sum(found, axis=0)
        if reached < mass:  # numbers between `below` and `split` do not occur
            high = tl.maximum(tl.max(below, axis=0).to(tl.int64), low)
            over = reached
        else:
            low = tl.min(above, axis=0).to(tl.int64)
    edge = high.to(tl.int32)
    needed = (mass - over) / tl.exp(_value(edge).to(tl.float64))
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
    """The first id at which the running sum exceeds `point`; the last that weighs where rounding
    puts the point on the total."""
    running = tl.full([], 0.0, tl.float64)
    token, last = count, tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    while (first < count) & (token == count):
        number, i = _at(numbers, first, count, LANES)
        weight = _weights(weights, number, i, border, limit, count)
        weight = tl.where(weight < least, 0.0, weight)
        sums = running + tl.cumsum(weight, axis=0)
        token = tl.min(tl.where((sums > point) & (weight > 0.0), i, count), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, i, 0), axis=0))
        running += tl.sum(weight, axis=0)
        first += LANES
    return tl.where(token == count, last, token)


@triton.jit(do_not_specialize=["vocab", "stride", "has_k", "has_p", "has_min"])
def draw_kernel(
    logits, best, bad, temperature, top_k, top_p, min_p, seed, index, numbers, weights, counters,
    tokens, vocab, stride, has_k, has_p, has_min, PART: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (row, part): rows of a temperature above 0 that are not bad get a drawn token."""
    row, part = tl.program_id(0), tl.program_id(1)
    heat = tl.load(temperature + row)
    if (heat > 0.0) & (tl.load(bad + row).to(tl.int32) == 0):
        place = row.to(tl.int64) * vocab
        numbers += place
        weights += place
        i = part * PART + tl.arange(0, PART)
        x = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < vocab, other=0.0)
        hot = tl.div_rn(x.to(tl.float32) - tl.load(best + row), tl.zeros([PART], tl.float32) + heat)
        tl.store(numbers + i, _ordered(hot), mask=i < vocab)
        tl.store(weights + i, tl.exp(hot.to(tl.float64)), mask=i < vocab)
        if _last(counters, row):
            tl.store(counters + row, 0)
            border, limit = tl.full([], _LEAST, tl.int32), vocab
            k = tl.full([], 0, tl.int64)
            if has_k > 0:
                k = tl.load(top_k + row)
            if (k > 0) & (k < vocab):
                border, limit = _of_top_k(numbers, vocab, k, LANES)
            p = tl.full([], 1.0, tl.float32)
            if has_p > 0:
                p = tl.load(top_p + row)
            if p < 1.0:
                mass = _total(numbers, weights, vocab, border, limit, 0.0, LANES)
                mass = mass * p.to(tl.float64)
                border, limit = _of_top_p(numbers, weights, vocab, border, limit, mass, LANES)
            least = tl.full([], 0.0, tl.float64)
            if has_min > 0:
                least = tl.load(min_p + row).to(tl.float64)
            total = _total(numbers, weights, vocab, border, limit, least, LANES)
            point = _uniform(tl.load(seed + row), tl.load(index + row)) * total
            token = _inverted(numbers, weights, vocab, border, limit, least, point, LANES)
            tl.store(tokens + row, token.to(tl.int64))
