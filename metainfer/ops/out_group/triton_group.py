"""Grouped products of activations as they are with FP8 weights as stored, in Triton.

The recipe: weights e4m3 with a scale per 128 x 128 block, decoded and rounded to the model's type;
activations in it; float32 sums. The weight's rows are the matrix unit's long side at every size: a
tile of them is decoded on its way to the registers of the left operand, once per tile of tokens,
and few tokens waste nothing. For few, K is cut into parts so that the whole card reads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.triton_e4m3 import e4m3_wide
from metainfer.ops.triton_parts import block_scale, come_early, finish


@triton.jit(do_not_specialize=["rows"])
def group_kernel(
    o, w, scales, out, parts, counters, rows, N, scale_stride,
    K: tl.constexpr, R: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr, TMA: tl.constexpr,
    WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile of BN rows and M tokens, part of K): o [rows, N / R K], w [N, K] -> [rows, N].

    Tiles of one group of heads follow each other, and in it those of GROUP tiles of tokens."""
    tiles_m = tl.cdiv(rows, M)
    tile, part = tl.program_id(0), tl.program_id(1)
    per: tl.constexpr = R // BN
    group = tile // (tiles_m * per)
    inside = tile % (tiles_m * per)
    lead = inside // (GROUP * per) * GROUP
    height = tl.minimum(tiles_m - lead, GROUP)
    tile_m = lead + inside % (GROUP * per) % height
    tile_n = group * per + inside % (GROUP * per) // height
    m = tile_m * M + tl.arange(0, M)
    n = tile_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    STEPS: tl.constexpr = K // SPLITS // BK
    first = part * (STEPS * BK)
    safe = tl.minimum(m, rows - 1).to(tl.int64)
    o_at = safe[:, None] * (N // R * K) + group * K + first + k[None, :]
    w_at = n.to(tl.int64)[:, None] * K + first + k[None, :]
    row_scale = (tile_n * BN // 128) * scale_stride + first // 128
    ahead = block_scale(scales, row_scale, E8M0)
    if EARLY:
        lines = tl.arange(0, BK * (STEPS & -STEPS) // 128)
        come_early(w + n.to(tl.int64)[:, None] * K + first + lines[None, :] * 128)
    acc = tl.zeros([BN, M], tl.float32)
    for step in range(STEPS):
        scale = ahead  # the next one is on its way while this block is multiplied
        ahead = block_scale(scales, row_scale + tl.minimum(step + 1, STEPS - 1) * BK // 128, E8M0)
        if TMA:
            values = o.load([tile_m * M, group * K + first + step * BK])
            block = w.load([tile_n * BN, first + step * BK])
        else:
            values = tl.load(o + o_at + step * BK)  # [M, BK]
            block = tl.load(w + w_at + step * BK)  # [BN, BK]
        matrix = (e4m3_wide(block) * scale).to(WIDE)
        acc = tl.dot(matrix, tl.trans(values.to(WIDE)), acc, input_precision="ieee")
    where = m.to(tl.int64)[None, :] * N + n[:, None]
    mask = (m < rows)[None, :] & (n < N)[:, None]
    finish(acc, out, parts, counters + tile, part, rows.to(tl.int64) * N, where, mask, SPLITS)


@triton.jit
def decode_kernel(w, scales, out, scale_stride, K: tl.constexpr, ROWS: tl.constexpr,
                  COLS: tl.constexpr, E8M0: tl.constexpr):  # fmt: skip
    """ROWS by COLS elements of w [N, K] in `out`'s type; ROWS divides 128."""
    row, first = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    k = first + tl.arange(0, COLS)
    at = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None] * K + k[None, :]
    scale = block_scale(scales, row // 128 * scale_stride + k // 128, E8M0)  # [COLS]
    values = e4m3_wide(tl.load(w + at)) * scale[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty))
