"""Experts stored as MXFP4, in Triton: packed weights are read once per touched expert.

The recipe rounds activations to e4m3 (2^e per 128 channels). Weights e2m1 x 2^s become e4m3
exactly as long as a row's scales span at most 2^11: a look-up table of eight bytes, shifted by the
group's exponent, is built in two registers and read by byte permutes, so that products run on the
matrix unit's FP8 instructions and only the activation scale is left to apply per 128 channels. Rows
that span more take the wide form (`EIGHT` off): elements times scale in bfloat16, exact too.

The weight's rows are the matrix unit's long side. Four outputs of one unpacking step hold channels
``16 c + 4 i + j`` at position ``4 c + j`` (i = 0..3); the activations are stored in that order, so
nothing is shuffled. `w13` goes through clamp, SwiGLU and routing weight in the epilogue.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.moe_experts.tiles import OPERANDS, UNPACK

_UNPACK = tl.constexpr(UNPACK)
_OPERANDS = tl.constexpr(OPERANDS)


@triton.jit
def _element(nibble):
    """e2m1 as float32."""
    size, sign = nibble & 7, nibble & 8
    grown = ((size >> 1) + 126) << 23 | (size & 1) << 22
    small = tl.where(size == 1, 0x3F000000, 0)
    bits = tl.where(size >= 2, grown, small) | sign << 28
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _wide_weights(w, scales, row, step, K: tl.constexpr, PART: tl.constexpr):
    """Channels ``16 c + 4 PART + j`` of a block of 128 as float32, scale included: [BN, 32]."""
    p = tl.arange(0, 32)
    at = step * 32 + p // 4 * 4 + PART
    word = tl.load(w + row[:, None] * (K // 4) + at[None, :]).to(tl.int32)
    value = _element(word >> (4 * (p % 4))[None, :])
    four = tl.load(scales + row * (K // 128) + step)  # [BN], four bytes
    code = (four[:, None] >> (8 * (p // 8))[None, :]) & 0xFF
    return value * (code << 23).to(tl.float32, bitcast=True)


@triton.jit
def _unpacked(
    w, scales, row, refer, pick, step, K: tl.constexpr, EIGHT: tl.constexpr, WIDE: tl.constexpr
):
    """The four outputs of one unpacking step of the rows `row`, e4m3 or WIDE: each [BN, 32]."""
    if EIGHT:
        p = tl.arange(0, 32)
        packed = tl.load(w + row[:, None] * (K // 4) + (step * 32 + p)[None, :])
        four = tl.broadcast_to(tl.load(scales + row * (K // 128) + step)[:, None], packed.shape)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _UNPACK, _OPERANDS, [packed, four, refer, pick],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
        w0 = w0.to(tl.float8e4nv, bitcast=True)
        w1 = w1.to(tl.float8e4nv, bitcast=True)
        w2 = w2.to(tl.float8e4nv, bitcast=True)
        w3 = w3.to(tl.float8e4nv, bitcast=True)
    else:
        w0 = _wide_weights(w, scales, row, step, K, 0).to(WIDE)
        w1 = _wide_weights(w, scales, row, step, K, 1).to(WIDE)
        w2 = _wide_weights(w, scales, row, step, K, 2).to(WIDE)
        w3 = _wide_weights(w, scales, row, step, K, 3).to(WIDE)
    return w0, w1, w2, w3


@triton.jit
def _product(
    w, scales, refs, row, x, x_scales, token, live,
    K: tl.constexpr, BN: tl.constexpr, M: tl.constexpr,
    EIGHT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``W[row] x[token]``: row [BN] int64 of the packed matrix, token [M] int64: [BN, M] float32.

    w: four elements in an int16; scales: four bytes in an int32.
    x: e4m3 in mixed order with `x_scales` [rows, K / 128].
    """
    p = tl.arange(0, 32)
    acc = tl.zeros([BN, M], tl.float32)
    ref = tl.load(refs + row).to(tl.int32)
    pick = tl.broadcast_to((p // 8 + 0x4440)[None, :], [BN, 32])
    refer = tl.broadcast_to(ref[:, None], [BN, 32])
    at = token * K
    for step in range(K // 128):
        here = x + at[:, None] + (step * 128 + p)[None, :]
        q0 = tl.load(here, mask=live[:, None], other=0.0)
        q1 = tl.load(here + 32, mask=live[:, None], other=0.0)
        q2 = tl.load(here + 64, mask=live[:, None], other=0.0)
        q3 = tl.load(here + 96, mask=live[:, None], other=0.0)
        scale = tl.load(x_scales + token * (K // 128) + step, mask=live, other=0.0)
        w0, w1, w2, w3 = _unpacked(w, scales, row, refer, pick, step, K, EIGHT, WIDE)
        if EIGHT:
            part = tl.dot(w0, tl.trans(q0))
            part = tl.dot(w1, tl.trans(q1), part)
            part = tl.dot(w2, tl.trans(q2), part)
            part = tl.dot(w3, tl.trans(q3), part)
        else:
            part = tl.dot(w0, tl.trans(q0.to(tl.float32).to(WIDE)), input_precision="ieee")
            part = tl.dot(w1, tl.trans(q1.to(tl.float32).to(WIDE)), part, input_precision="ieee")
            part = tl.dot(w2, tl.trans(q2.to(tl.float32).to(WIDE)), part, input_precision="ieee")
            part = tl.dot(w3, tl.trans(q3.to(tl.float32).to(WIDE)), part, input_precision="ieee")
        acc += part * scale[None, :]
    if EIGHT:  # the table holds elements times 2^(s - ref + 6)
        acc *= ((ref - 6) << 23).to(tl.float32, bitcast=True)[:, None]
    return acc


@triton.jit
def _tokens_product(
    w, scales, refs, row, q, q_scales, token, live,
    K: tl.constexpr, BN: tl.constexpr, M: tl.constexpr, EIGHT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``q[token] W[row]^T``: [M, BN] float32; q e4m3 in mixed order, q_scales [rows, K / 128]."""
    p = tl.arange(0, 32)
    acc = tl.zeros([M, BN], tl.float32)
    ref = tl.load(refs + row).to(tl.int32)
    pick = tl.broadcast_to((p // 8 + 0x4440)[None, :], [BN, 32])
    refer = tl.broadcast_to(ref[:, None], [BN, 32])
    at = token * K
    mask = live[:, None]
    for step in range(K // 128):
        w0, w1, w2, w3 = _unpacked(w, scales, row, refer, pick, step, K, EIGHT, WIDE)
        here = q + at[:, None] + (step * 128 + p)[None, :]
        q0 = tl.load(here, mask=mask, other=0.0)
        q1 = tl.load(here + 32, mask=mask, other=0.0)
        q2 = tl.load(here + 64, mask=mask, other=0.0)
        q3 = tl.load(here + 96, mask=mask, other=0.0)
        scale = tl.load(q_scales + token * (K // 128) + step, mask=live, other=0.0)
        if EIGHT:
            part = tl.dot(q0, tl.trans(w0))
            part = tl.dot(q1, tl.trans(w1), part)
            part = tl.dot(q2, tl.trans(w2), part)
            part = tl.dot(q3, tl.trans(w3), part)
        else:
            part = tl.dot(q0.to(tl.float32).to(WIDE), tl.trans(w0), input_precision="ieee")
            part = tl.dot(q1.to(tl.float32).to(WIDE), tl.trans(w1), part, input_precision="ieee")
            part = tl.dot(q2.to(tl.float32).to(WIDE), tl.trans(w2), part, input_precision="ieee")
            part = tl.dot(q3.to(tl.float32).to(WIDE), tl.trans(w3), part, input_precision="ieee")
        acc += part * scale[:, None]
    if EIGHT:
        acc *= ((ref - 6) << 23).to(tl.float32, bitcast=True)[None, :]
    return acc


@triton.jit
def _gated(gate, up, limit):
    """``silu(min(gate, L)) clamp(up, -L, L)``."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _mine(ids, slot, SLOTS: tl.constexpr, slots):
    """(expert, how many pairs chose it, rank of each pair), count 0 unless `slot` is its first."""
    at = tl.arange(0, SLOTS)
    chosen = tl.load(ids + at, mask=at < slots, other=-1)
    expert = tl.load(ids + slot)
    same = (chosen == expert).to(tl.int32)
    earlier = tl.sum(tl.where(at < slot, same, 0), axis=0)
    count = tl.where((expert >= 0) & (earlier == 0), tl.sum(same, axis=0), 0)
    rank = tl.where(same == 1, tl.cumsum(same, axis=0) - 1, SLOTS)
    return expert, count, rank


@triton.jit
def _pairs(rank, base, M: tl.constexpr, SLOTS: tl.constexpr):
    """The pairs of ranks ``base .. base + M - 1``: [M]."""
    m = tl.arange(0, M)
    at = tl.arange(0, SLOTS)
    return tl.sum(tl.where(rank[:, None] == base + m[None, :], at[:, None], 0), axis=0)


@triton.jit(do_not_specialize=["slots"])
def stream_up_kernel(
    x, x_scales, ids, routes, w, scales, refs, hidden, limit, slots,
    D: tl.constexpr, F: tl.constexpr, TOP: tl.constexpr, BN: tl.constexpr, M: tl.constexpr,
    SLOTS: tl.constexpr, EIGHT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Few tokens: program (tile of hidden channels, pair); the first pair of an expert works."""
    tile, slot = tl.program_id(0), tl.program_id(1)
    expert, count, rank = _mine(ids, slot, SLOTS, slots)
    m, r = tl.arange(0, M), tl.arange(0, BN)
    f = tile * (BN // 2) + r % (BN // 2)
    row = expert.to(tl.int64) * (2 * F) + r // (BN // 2) * F + f
    for base in range(0, count, M):
        pair = _pairs(rank, base, M, SLOTS)
        live = base + m < count
        acc = _product(
            w, scales, refs, row, x, x_scales, (pair // TOP).to(tl.int64), live,
            D, BN, M, EIGHT, WIDE,
        )  # fmt: skip
        route = tl.load(routes + pair, mask=live, other=0.0)
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BN // 2, M]), (1, 2, 0)))
        value = _gated(gate, up, limit) * route[None, :]
        out = tile * (BN // 2) + tl.arange(0, BN // 2)
        where = pair.to(tl.int64)[None, :] * F + out[:, None]
        tl.store(hidden + where, value.to(hidden.dtype.element_ty), mask=live[None, :])


@triton.jit(do_not_specialize=["slots"])
def stream_down_kernel(
    hidden, x_scales, ids, w, scales, refs, out, slots,
    D: tl.constexpr, F: tl.constexpr, BN: tl.constexpr, M: tl.constexpr,
    SLOTS: tl.constexpr, EIGHT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tile, slot = tl.program_id(0), tl.program_id(1)
    expert, count, rank = _mine(ids, slot, SLOTS, slots)
    m, d = tl.arange(0, M), tile * BN + tl.arange(0, BN)
    row = expert.to(tl.int64) * D + d
    for base in range(0, count, M):
        pair = _pairs(rank, base, M, SLOTS).to(tl.int64)
        live = base + m < count
        acc = _product(
            w, scales, refs, row, hidden, x_scales, pair, live,
            F, BN, M, EIGHT, WIDE,
        )  # fmt: skip
        where = pair[None, :] * D + d[:, None]
        tl.store(out + where, acc.to(out.dtype.element_ty), mask=live[None, :])


@triton.jit
def _block(tiles, bounds, block, E: tl.constexpr, M: tl.constexpr):
    """(expert, first place in the sorted pairs, how many) of row block `block`; 0 past the end."""
    left, right = 0, E
    while left < right:
        middle = (left + right) // 2
        if tl.load(tiles + middle + 1) <= block:
            left = middle + 1
        else:
            right = middle
    expert = tl.minimum(left, E - 1)
    first = tl.load(bounds + expert) + (block - tl.load(tiles + expert)) * M
    count = tl.minimum(tl.load(bounds + expert + 1) - first, M)
    return expert, first, tl.where(left < E, count, 0)


@triton.jit
def chunk_up_kernel(
    q, q_scales, order, tiles, bounds, routes, w, scales, refs, hidden, limit,
    D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, BN: tl.constexpr,
    M: tl.constexpr, EIGHT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Many tokens: row blocks of pairs sorted by expert; `hidden` keeps the sorted order."""
    tile, block = tl.program_id(0), tl.program_id(1)
    expert, first, count = _block(tiles, bounds, block, E, M)
    if count > 0:
        m, r = tl.arange(0, M), tl.arange(0, BN)
        live = m < count
        pair = tl.load(order + first + m, mask=live, other=0).to(tl.int64)
        f = tile * (BN // 2) + r // 2  # gate and up of a channel stand side by side
        row = expert.to(tl.int64) * (2 * F) + r % 2 * F + f
        acc = _tokens_product(
            w, scales, refs, row, q, q_scales, pair // TOP, live,
            D, BN, M, EIGHT, WIDE,
        )  # fmt: skip
        route = tl.load(routes + pair, mask=live, other=0.0)
        gate, up = tl.split(tl.reshape(acc, [M, BN // 2, 2]))
        value = _gated(gate, up, limit) * route[:, None]
        out = tile * (BN // 2) + tl.arange(0, BN // 2)
        where = (first + m).to(tl.int64)[:, None] * F + out[None, :]
        tl.store(hidden + where, value.to(hidden.dtype.element_ty), mask=live[:, None])


@triton.jit
def chunk_down_kernel(
    q, q_scales, order, tiles, bounds, w, scales, refs, out,
    D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, M: tl.constexpr,
    EIGHT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    expert, first, count = _block(tiles, bounds, block, E, M)
    if count > 0:
        m, d = tl.arange(0, M), tile * BN + tl.arange(0, BN)
        live = m < count
        pair = tl.load(order + first + m, mask=live, other=0).to(tl.int64)
        row = expert.to(tl.int64) * D + d
        acc = _tokens_product(
            w, scales, refs, row, q, q_scales, (first + m).to(tl.int64), live,
            F, BN, M, EIGHT, WIDE,
        )  # fmt: skip
        where = pair[:, None] * D + d[None, :]
        tl.store(out + where, acc.to(out.dtype.element_ty), mask=live[:, None])
