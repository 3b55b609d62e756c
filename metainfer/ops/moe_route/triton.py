"""DeepSeek's router in one launch: products with the gate, scores, the choice, weights.

A program takes a block of tokens, all experts and a part of the channels; the last of a block to
arrive adds the parts in order and chooses. Products of halves are exact and summed in float32; a
float32 gate beside bfloat16 tokens is multiplied as three bfloat16 parts, which hold all its bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _product(x, gate, acc, EXACT: tl.constexpr):
    """``acc + x gate^T``: x [M, K], gate [E, K]."""
    if EXACT:
        wide = tl.trans(gate.to(tl.float32))
        acc = tl.dot(x.to(tl.float32), wide, acc, input_precision="ieee")
    elif gate.dtype == x.dtype:
        acc = tl.dot(x, tl.trans(gate), acc)
    else:
        high = gate.to(x.dtype)
        rest = gate - high.to(tl.float32)
        middle = rest.to(x.dtype)
        low = (rest - middle.to(tl.float32)).to(x.dtype)
        acc = tl.dot(x, tl.trans(low), acc)
        acc = tl.dot(x, tl.trans(middle), acc)
        acc = tl.dot(x, tl.trans(high), acc)
    return acc


@triton.jit
def _root_softplus(x):
    """``sqrt(ln(1 + e^x))``: ln(1 + u) = 2 artanh(u / (2 + u)), by its series for u <= 1."""
    u = tl.exp(-tl.abs(x))
    z = u / (2.0 + u)
    s = z * z
    series = 1.0 / 17
    series = series * s + 1.0 / 15
    series = series * s + 1.0 / 13
    series = series * s + 1.0 / 11
    series = series * s + 1.0 / 9
    series = series * s + 1.0 / 7
    series = series * s + 1.0 / 5
    series = series * s + 1.0 / 3
    series = series * s + 1.0
    return tl.sqrt_rn(tl.where(x > 0, x, 0.0) + 2.0 * z * series)


@triton.jit
def _ordered(sums, known):
    """float32 sums [M, EP] as whole numbers in their order: NaN first, one zero; what is no expert
    comes last."""
    bits = tl.where(sums == 0.0, 0.0, sums).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(sums == sums, bits, 0x7FFFFFFF)
    return tl.where(known[None, :], bits, -(1 << 31))


@triton.jit
def _choose(
    logits, row, live, bias, table, tokens, ids, weights, scale,
    E: tl.constexpr, EP: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr,
    HASH: tl.constexpr,
):  # fmt: skip
    expert, place = tl.arange(0, EP), tl.arange(0, PLACES)
    s = _root_softplus(logits)
    token, key = row, expert
    if HASH:
        token = tl.load(tokens + row, mask=live, other=0)
    else:
        sums = s + tl.load(bias + expert, mask=expert < E, other=0.0)[None, :]
        key = _ordered(sums, expert < E)
    chosen = tl.zeros([logits.shape[0], PLACES], tl.float32)
    for j in range(TOP):
        if HASH:
            found = tl.load(table + token * TOP + j, mask=live, other=0).to(tl.int32)
        else:
            best = tl.max(key, axis=1)
            found = tl.min(tl.where(key == best[:, None], expert[None, :], EP), axis=1)
        here = expert[None, :] == found[:, None]
        score = tl.sum(tl.where(here, s, 0.0), axis=1)
        chosen = tl.where((place == j)[None, :], score[:, None], chosen)
        tl.store(ids + row * TOP + j, found, mask=live)
        if not HASH:
            key = tl.where(here, -(1 << 31), key)
    total = tl.sum(chosen, axis=1) + 1e-20
    share = tl.div_rn(chosen, tl.broadcast_to(total[:, None], chosen.shape)) * scale
    at = row.to(tl.int64)[:, None] * TOP + place[None, :]
    tl.store(weights + at, share, mask=live[:, None] & (place < TOP)[None, :])


@triton.jit(do_not_specialize=["rows", "x_stride", "share"])
def route_kernel(
    x, gate, bias, table, tokens, parts, counters, ids, weights, rows, x_stride, scale, share,
    K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr,
    M: tl.constexpr, BK: tl.constexpr, HASH: tl.constexpr, ALONE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Program (block of M tokens, part): steps ``part * share ..`` of BK channels. ALONE: one part
    has all. HASH: experts are rows of `table` by token id, otherwise by score and `bias`."""
    block, part = tl.program_id(0), tl.program_id(1)
    row = block * M + tl.arange(0, M)
    live = row < rows
    expert, k = tl.arange(0, EP), tl.arange(0, BK)
    known = expert < E
    acc = tl.zeros([M, EP], tl.float32)
    left = x + row.to(tl.int64)[:, None] * x_stride
    right = gate + expert[:, None] * K
    for step in range(part * share, tl.minimum((part + 1) * share, tl.cdiv(K, BK))):
        at = step * BK + k
        inside = (at < K)[None, :]
        token = tl.load(left + at[None, :], mask=live[:, None] & inside, other=0.0)
        wide = tl.load(right + at[None, :], mask=known[:, None] & inside, other=0.0)
        acc = _product(token, wide, acc, EXACT)
    if ALONE:
        _choose(acc, row, live, bias, table, tokens, ids, weights, scale, E, EP, TOP, PLACES, HASH)
    else:
        where = row.to(tl.int64)[:, None] * EP + expert[None, :]
        size = rows.to(tl.int64) * EP
        tl.store(parts + part * size + where, acc, mask=live[:, None])
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + block, 1, sem="acq_rel")
        if arrived == tl.num_programs(1) - 1:
            tl.store(counters + block, 0)
            total = tl.zeros([M, EP], tl.float32)
            for other in range(tl.num_programs(1)):
                total += tl.load(
                    parts + other * size + where, mask=live[:, None], other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
            _choose(
                total, row, live, bias, table, tokens, ids, weights, scale, E, EP, TOP, PLACES,
                HASH,
            )  # fmt: skip
