"""DeepSeek-V4's router in two launches: products with the gate, then choice and weights.

A program of the first multiplies some tokens with some experts over a part of the channels; one
warp of the second adds a token's parts in order, chooses and weighs, every reduction within the
warp. Products of halves are exact and summed in float32; a float32 gate beside bfloat16 tokens is
multiplied as three bfloat16 parts, which hold all its bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.triton_order import ordered
from metainfer.ops.triton_parts import come_early

_LOWEST = tl.constexpr(-(1 << 31))


@triton.jit
def _product(x, gate, EXACT: tl.constexpr):
    """``x gate^T``: x [M, K], gate [E, K]."""
    if EXACT:
        wide = tl.trans(gate.to(tl.float32))
        acc = tl.dot(x.to(tl.float32), wide, input_precision="ieee")
    elif gate.dtype == x.dtype:
        acc = tl.dot(x, tl.trans(gate))
    else:
        high = gate.to(x.dtype)
        rest = gate - high.to(tl.float32)
        middle = rest.to(x.dtype)
        low = (rest - middle.to(tl.float32)).to(x.dtype)
        acc = tl.dot(x, tl.trans(low))
        acc = tl.dot(x, tl.trans(middle), acc)
        acc = tl.dot(x, tl.trans(high), acc)
    return acc


@triton.jit(do_not_specialize=["rows"])
def score_kernel(
    x, gate, parts, rows, x_stride, one,
    K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, SHARE: tl.constexpr,
    M: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (M tokens, BE experts, part): logits of steps ``part SHARE ..`` of BK channels, in
    `parts` [splits, rows, EP]. A matrix unit cuts digits off where it adds to a running sum, so a
    step is summed apart and added in float32; times `one`, lest the compiler chain them. EARLY:
    started before the kernel in front ended; the first of the gate's lines are asked for."""
    block, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, k = block * M + tl.arange(0, M), tl.arange(0, BK)
    expert = tile * BE + tl.arange(0, BE)
    live, known = (row < rows)[:, None], (expert < E)[:, None]
    left = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    right = gate + expert[:, None] * K + k[None, :]
    acc = tl.zeros([M, BE], tl.float32)
    if EARLY:
        asked = part * SHARE * BK + tl.minimum(tl.arange(0, 8) * 64, SHARE * BK - 1)
        held = tl.minimum(expert, E - 1)[:, None] * K
        come_early(gate + held + tl.minimum(asked, K - 1)[None, :])
    for step in range(part * SHARE, tl.minimum((part + 1) * SHARE, tl.cdiv(K, BK))):
        at = step * BK
        if K % BK == 0:
            token = tl.load(left + at, mask=live, other=0.0)
            weight = tl.load(right + at, mask=known, other=0.0)
        else:
            inside = (at + k < K)[None, :]
            token = tl.load(left + at, mask=live & inside, other=0.0)
            weight = tl.load(right + at, mask=known & inside, other=0.0)
        acc += _product(token, weight, EXACT) * one
    where = (part * rows + row).to(tl.int64)[:, None] * EP + expert[None, :]
    tl.store(parts + where, acc, mask=live & (expert < EP)[None, :])


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
    """float32 sums [EP] as whole numbers in their order: NaN first, one zero; what is no expert
    comes last."""
    return tl.where(known, ordered(sums), _LOWEST)


@triton.jit
def _best(s, key, EP: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr):
    """The TOP highest of key [EP], ties to the lower expert: (experts, scores) [PLACES]. Scores
    pass as their bits: a warp takes the largest of whole numbers in one instruction."""
    expert, place = tl.arange(0, EP), tl.arange(0, PLACES)
    bits = s.to(tl.int32, bitcast=True)
    found = tl.zeros([PLACES], tl.int32)
    score = tl.zeros([PLACES], tl.int32)
    for j in tl.static_range(TOP):
        first = tl.min(tl.where(key == tl.max(key, axis=0), expert, EP), axis=0)
        here = expert == first
        found = tl.where(place == j, first, found)
        score = tl.where(place == j, tl.max(tl.where(here, bits, _LOWEST), axis=0), score)
        key = tl.where(here, _LOWEST, key)
    return found, score.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def choose_kernel(
    parts, bias, table, tokens, ids, weights, rows, scale,
    E: tl.constexpr, EP: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr,
    SPLITS: tl.constexpr, HASH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program: a token. HASH: experts are a row of `table` by token id, otherwise by score and
    `bias`. EARLY: started while the first kernel runs, as the next one may be."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, PLACES)
    own, size = parts + row * EP, rows.to(tl.int64) * EP
    if HASH:
        at = table + tl.load(tokens + row) * TOP + place
        found = tl.load(at, mask=place < TOP, other=0).to(tl.int32)
        logits = tl.zeros([PLACES], tl.float32)
        for part in tl.static_range(SPLITS):
            logits += tl.load(own + part * size + found)
        chosen = _root_softplus(logits)
    else:
        expert = tl.arange(0, EP)
        total = tl.zeros([EP], tl.float32)
        for part in tl.static_range(SPLITS):
            total += tl.load(own + part * size + expert)
        s = _root_softplus(total)
        added = tl.load(bias + expert, mask=expert < E, other=0.0)
        found, chosen = _best(s, _ordered(s + added, expert < E), EP, TOP, PLACES)
    chosen = tl.where(place < TOP, chosen, 0.0)
    share = tl.div_rn(chosen, tl.broadcast_to(tl.sum(chosen, axis=0) + 1e-20, chosen.shape)) * scale
    tl.store(ids + row * TOP + place, found, mask=place < TOP)
    tl.store(weights + row * TOP + place, share, mask=place < TOP)
