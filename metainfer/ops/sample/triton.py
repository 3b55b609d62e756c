"""Sampling on the device without a question to the host: a row is read by many programs.

Logits are compared as whole numbers that order as they do. `best_kernel` keeps the best id of each
part of a row; greedy rows need `pick_kernel` alone. For others `weigh_kernel` adds up the float64
weights of each part (and counts its logits in bins where top-k or top-p may drop some), and
`draw_kernel`, one program a row, finds the part in which the drawn point lies, then the id. Rows
with a filter go on in `triton_kept.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.triton_order import ordered

LEAST = tl.constexpr(-(1 << 31))
"""Below every number."""
_NO_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def value_of(number):
    """The float32 behind a number that `ordered` gave."""
    bits = tl.where(number < 0, number ^ 0x7FFFFFFF, number)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["vocab", "stride"])
def best_kernel(logits, keys, vocab, stride, PART: tl.constexpr):
    """Program (row, part). `keys`: the highest number of the part, then the lower id of equals."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * stride + i, mask=i < vocab, other=0.0)
    key = (ordered(x.to(tl.float32)).to(tl.int64) << 32) + (vocab - 1 - i)
    key = tl.max(tl.where(i < vocab, key, _NO_KEY), axis=0)
    tl.store(keys + row * tl.num_programs(1) + part, key)


@triton.jit
def _best(keys, row, vocab, parts, PARTS: tl.constexpr):
    """(highest logit of the row, its first id, whether it is not finite; NaN is the highest)."""
    p = tl.arange(0, PARTS)
    highest = tl.max(tl.load(keys + row * parts + p, mask=p < parts, other=_NO_KEY), axis=0)
    value = value_of((highest >> 32).to(tl.int32))
    broken = (value != value) | (tl.abs(value) == float("inf"))
    return value, vocab - 1 - (highest & 0xFFFFFFFF), broken


@triton.jit(do_not_specialize=["vocab", "parts", "zero"])
def pick_kernel(keys, tokens, bad, vocab, parts, zero, PARTS: tl.constexpr):
    """Program (row): the best id, 0 for a bad row if `zero`."""
    row = tl.program_id(0).to(tl.int64)
    _, token, broken = _best(keys, row, vocab, parts, PARTS)
    tl.store(bad + row, broken)
    tl.store(tokens + row, tl.where(broken & (zero > 0), 0, token))


@triton.jit
def filters(top_k, top_p, row, vocab, has_k, has_p):
    """(k, 0 where it drops nothing; p, 1 where it drops nothing) of a row."""
    k = tl.full([], 0, tl.int64)
    if has_k > 0:
        k = tl.load(top_k + row)
    p = tl.full([], 1.0, tl.float32)
    if has_p > 0:
        p = tl.load(top_p + row)
    return tl.where((k > 0) & (k < vocab), k, 0), tl.minimum(p, 1.0)


@triton.jit
def logits_at(logits, row, stride, i, vocab):
    """float32 logits of the ids i, -inf beyond the vocabulary."""
    x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def tempered(x, best, heat, LANES: tl.constexpr):
    """(x - best) / temperature of logits x [LANES], correctly rounded."""
    return tl.div_rn(x - best, tl.zeros([LANES], tl.float32) + heat)


@triton.jit
def bin_of(hot, BINS: tl.constexpr):
    """Of a tempered logit: rises as it falls; `edge_of` bounds what a bin holds."""
    bits = (1.0 - hot).to(tl.int32, bitcast=True) >> 18
    return tl.minimum(bits - (127 << 5), BINS - 1)


@triton.jit
def edge_of(number):
    """The highest tempered logit of a bin, but for rounding, in float64."""
    bits = (number + (127 << 5)) << 18
    return 1.0 - bits.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _weights(hot, least):
    weight = tl.exp(hot.to(tl.float64))
    return tl.where(weight < least, 0.0, weight)


@triton.jit
def least_of(min_p, row, has_min):
    """The least weight that is not dropped; the best id weighs 1."""
    least = tl.full([], 0.0, tl.float64)
    if has_min > 0:
        least = tl.load(min_p + row).to(tl.float64)
    return least


@triton.jit(do_not_specialize=["vocab", "stride", "has_k", "has_p", "has_min"])
def weigh_kernel(
    logits, keys, temperature, top_k, top_p, min_p, best, sums, counts, tokens, bad,
    vocab, stride, has_k, has_p, has_min,
    PART: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Program (row, part). `best`: the row's highest logit where the row draws, else NaN. `sums`:
    the part's weight, `counts`: its logits per bin (rows with a filter; with top-k no weight)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    i = part * PART + tl.arange(0, PART)
    x = logits_at(logits, row, stride, i, vocab)  # on their way while the best is found
    heat = tl.load(temperature + row)
    value, token, broken = _best(keys, row, vocab, parts, PARTS)
    draws = (heat > 0.0) & (not broken)
    if part == 0:
        tl.store(best + row, tl.where(draws, value, float("nan")))
        tl.store(bad + row, broken)
        tl.store(tokens + row, tl.where(broken, 0, token))
    if draws:
        k, p = filters(top_k, top_p, row, vocab, has_k, has_p)
        hot = tempered(x, value, heat, PART)
        place = row * parts + part
        if k == 0:
            least = least_of(min_p, row, has_min)
            weight = _weights(hot, tl.where(p < 1.0, 0.0, least))
            tl.store(sums + place, tl.sum(weight, axis=0))
        if (k > 0) | (p < 1.0):
            found = tl.histogram(bin_of(hot, BINS), BINS, mask=i < vocab)
            tl.store(counts + place * BINS + tl.arange(0, BINS), found)


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
def uniform(seed, index):
    """`draw.uniform`, to the bit."""
    inner = _mix(seed + -7046029254386353131)
    bits = _mix(inner + index * -7046029254386353131 + -4658895280553007687)
    return _shifted(bits, 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _invert(
    logits, sums, row, stride, vocab, parts, best, heat, least, random,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The first id at which the running sum exceeds its share `random` of the total; the last that
    weighs where rounding puts the point on the total."""
    p = tl.arange(0, PARTS)
    held = tl.load(sums + row * parts + p, mask=p < parts, other=0.0)
    upto = tl.cumsum(held, axis=0)
    point = random * tl.max(upto, axis=0)
    part = tl.min(tl.where((upto > point) & (held > 0.0), p, PARTS), axis=0)
    part = tl.where(part == PARTS, tl.max(tl.where(held > 0.0, p, 0), axis=0), part)
    before = tl.sum(tl.where(p < part, held, 0.0), axis=0)
    i = part * PART + tl.arange(0, PART)
    x = logits_at(logits, row, stride, i, vocab)
    weight = _weights(tempered(x, best, heat, PART), least)
    over = (before + tl.cumsum(weight, axis=0) > point) & (weight > 0.0)
    token = tl.min(tl.where(over, i, vocab), axis=0)
    return tl.where(token == vocab, tl.max(tl.where(weight > 0.0, i, 0), axis=0), token)


@triton.jit
def _narrow(
    sums, counts, offsets, row, parts, k, p,
    PARTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last bin that top-k or top-p may keep something of. `offsets`: how many ids of earlier
    parts are in the bins up to it; at the end, of all parts."""
    b = tl.arange(0, BINS)
    lines = counts + row * parts * BINS + b[None, :]
    found = tl.zeros([BINS], tl.int32)
    for first in range(0, parts, BLOCK):
        q = first + tl.arange(0, BLOCK)[:, None]
        found += tl.sum(tl.load(lines + q * BINS, mask=q < parts, other=0), axis=0)
    if k > 0:
        limit = tl.sum((tl.cumsum(found, axis=0) < k).to(tl.int32), axis=0)
    else:
        at = tl.arange(0, PARTS)
        total = tl.sum(tl.load(sums + row * parts + at, mask=at < parts, other=0.0), axis=0)
        # At most this weighs a bin, and what is worse than the last one must be a part 1 - p or
        # less; the margin is far beyond the rounding of edges and sums.
        most = found.to(tl.float64) * tl.exp(edge_of(b)) * 1.001
        worse = tl.cumsum(most, axis=0, reverse=True) - most
        limit = tl.sum((worse > (1.0 - p.to(tl.float64)) * total).to(tl.int32), axis=0)
    before = tl.full([], 0, tl.int32)
    for first in range(0, parts, BLOCK):
        q = first + tl.arange(0, BLOCK)
        here = (q[:, None] < parts) & (b[None, :] <= limit)
        inside = tl.sum(tl.load(lines + q[:, None] * BINS, mask=here, other=0), axis=1)
        upto = before + tl.cumsum(inside, axis=0)
        tl.store(offsets + row * (parts + 1) + q, upto - inside, mask=q < parts)
        before += tl.sum(inside, axis=0)
    tl.store(offsets + row * (parts + 1) + parts, before)
    return limit


@triton.jit(do_not_specialize=["vocab", "stride", "parts", "has_k", "has_p", "has_min"])
def draw_kernel(
    logits, best, temperature, top_k, top_p, min_p, seed, index, sums, counts, offsets, limits,
    tokens, vocab, stride, parts, has_k, has_p, has_min,
    PART: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): the drawn id of a row without top-k and top-p. `limits`: the last bin that
    they may keep something of; -1 where a row is done."""
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(best + row)
    limit = tl.full([], -1, tl.int32)
    if value == value:
        k, p = filters(top_k, top_p, row, vocab, has_k, has_p)
        if (k > 0) | (p < 1.0):
            limit = _narrow(sums, counts, offsets, row, parts, k, p, PARTS, BINS, BLOCK)
        else:
            random = uniform(tl.load(seed + row), tl.load(index + row))
            token = _invert(
                logits, sums, row, stride, vocab, parts, value, tl.load(temperature + row),
                least_of(min_p, row, has_min), random, PART, PARTS,
            )  # fmt: skip
            tl.store(tokens + row, token.to(tl.int64))
    tl.store(limits + row, limit)
