"""FP8 products with block scales in Triton: quantised activations, e4m3 operands, float32 sums.

The recipe of the checkpoint: activations e4m3 with a scale 2^e per token and 128 channels, weights
e4m3 with a scale per 128 x 128 block; each block of 128 channels is summed by the matrix unit and
scaled in float32. `stream` reads the weight once for few tokens: the weight's rows are the matrix
unit's long side, K is cut into parts so that the whole card reads, and the last part to arrive
adds the others in order (same sum every time). `chunk` is the tiled product for many tokens;
its activations are quantised by one pass before it. Where the card has no e4m3 (`EIGHT` off) the
same numbers are multiplied in the WIDE type, which holds them exactly: equal but for the order of
sums.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.triton_e4m3 import e4m3_rounded, e4m3_wide
from metainfer.ops.triton_parts import block_scale, come_early, finish, power


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # ordered as numbers are, NaN last


@triton.jit(do_not_specialize=["rows", "stride", "row_stride", "block_stride"])
def quantise_kernel(
    x, q, scales, rows, stride, row_stride, block_stride, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of 128 channels of ROWS tokens, as e4m3 or as the same numbers in a wider type.
    MIXED: in the order that packed FP4 unpacks to."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    col = tl.arange(0, 128)
    live = (row < rows)[:, None, None]
    at = row.to(tl.int64)[:, None, None] * stride + (block * 128)[None, :, None]
    values = tl.load(x + at + col[None, None, :], mask=live, other=0.0).to(tl.float32)
    scale, inverse = power(tl.max(_magnitude(values), axis=2))  # [ROWS, BLOCKS]
    if MIXED:  # k = 16 c + 4 i + j stands at 32 i + 4 c + j
        col = (col // 4 % 4) * 32 + col // 16 * 4 + col % 4
    at = row.to(tl.int64)[:, None, None] * K + (block * 128)[None, :, None]
    values *= inverse[:, :, None]
    if q.dtype.element_ty != tl.float8e4nv:
        values = e4m3_rounded(values)
    tl.store(q + at + col[None, None, :], values.to(q.dtype.element_ty), mask=live)
    where = row.to(tl.int64)[:, None] * row_stride + block[None, :] * block_stride
    tl.store(scales + where, scale, mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def stream_kernel(
    x, w, scales, out, parts, counters, rows, x_stride, N, scale_stride,
    K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    STEPS: tl.constexpr, E8M0: tl.constexpr, EIGHT: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    held = tl.minimum(n, N - 1).to(tl.int64)
    m, k = tl.arange(0, M), tl.arange(0, 128)
    live = (m < rows)[:, None]
    acc = tl.zeros([BN, M], tl.float32)
    first = part * STEPS
    weight = w + held[:, None] * K + first * 128 + k[None, :]
    token = x + m.to(tl.int64)[:, None] * x_stride + first * 128 + k[None, :]
    row_scale = (tile * BN // 128) * scale_stride + first
    ahead = block_scale(scales, row_scale, E8M0)
    if EARLY > 0:
        asked = first + tl.minimum(tl.arange(0, EARLY), STEPS - 1)
        come_early(w + held[:, None] * K + asked[None, :] * 128)
    for step in range(STEPS):
        weight_scale = ahead  # the next one is on its way while this block is multiplied
        ahead = block_scale(scales, row_scale + tl.minimum(step + 1, STEPS - 1), E8M0)
        wide = tl.load(token + step * 128, mask=live, other=0.0).to(tl.float32)  # [M, 128]
        scale, inverse = power(tl.max(_magnitude(wide), axis=1))
        values = wide * inverse[:, None]
        block = tl.load(weight + step * 128)  # [BN, 128]
        if EIGHT:
            product = tl.dot(block, tl.trans(values.to(tl.float8e4nv)))
        else:
            product = tl.dot(
                e4m3_wide(block).to(WIDE), tl.trans(e4m3_rounded(values).to(WIDE)),
                input_precision="ieee",
            )  # fmt: skip
        acc += product * (scale * weight_scale)[None, :]
    where = m.to(tl.int64)[None, :] * N + n[:, None]
    mask = (n < N)[:, None] & (m < rows)[None, :]
    finish(acc, out, parts, counters + tile, part, rows.to(tl.int64) * N, where, mask, SPLITS)


@triton.jit(do_not_specialize=["rows", "scale_rows"])
def chunk_kernel(
    q, q_scales, w, scales, out, parts, counters, rows, scale_rows, N, scale_stride,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, E8M0: tl.constexpr, TMA: tl.constexpr, EIGHT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Tile of BM tokens by BN rows, part of K; neighbours in the grid share weight rows through
    the cache."""
    tiles_m, tiles_n = tl.cdiv(rows, BM), tl.cdiv(N, BN)
    program = tl.program_id(0)
    part = tl.program_id(1) if SPLITS > 1 else 0
    per = GROUP * tiles_n
    lead = program // per * GROUP
    height = tl.minimum(tiles_m - lead, GROUP)
    tile_m = lead + program % per % height
    tile_n = program % per // height
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    k = tl.arange(0, 128)
    STEPS: tl.constexpr = K // 128 // SPLITS
    first = part * STEPS
    safe = tl.minimum(m, rows - 1)
    a_at = safe.to(tl.int64)[:, None] * K + first * 128 + k[None, :]
    b_at = tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + first * 128 + k[None, :]
    row_scale = (tile_n * BN // 128) * scale_stride + first
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(STEPS):
        if TMA:
            a = q.load([tile_m * BM, (first + step) * 128])
            b = w.load([tile_n * BN, (first + step) * 128])
        else:
            a = tl.load(q + a_at + step * 128)  # [BM, 128]
            b = tl.load(w + b_at + step * 128)  # [BN, 128]
        scale = tl.load(q_scales + (first + step) * scale_rows + safe)
        if EIGHT:
            product = tl.dot(a, tl.trans(b))
        else:
            product = tl.dot(
                e4m3_wide(a).to(WIDE), tl.trans(e4m3_wide(b).to(WIDE)), input_precision="ieee"
            )
        factor = scale * block_scale(scales, row_scale + step, E8M0)
        acc += product * factor[:, None]
    where = m.to(tl.int64)[:, None] * N + n[None, :]
    mask = (m < rows)[:, None] & (n < N)[None, :]
    counter = counters + program
    finish(acc, out, parts, counter, part, rows.to(tl.int64) * N, where, mask, SPLITS)
