"""Grouped products of few activations as they are with FP8 weights as stored, in Triton.

Weights are e4m3 with a scale per 128 x 128 block. A tile of them is widened on its way to the
registers of the matrix unit's left operand (its long side, so that few tokens waste nothing); each
block of 128 channels is summed by the unit and scaled in float32. K is cut into parts so that the
whole card reads. For many tokens the matrix is decoded once and given to the library.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.triton_e4m3 import e4m3_wide
from metainfer.ops.triton_parts import block_scale, finish


@triton.jit(do_not_specialize=["rows"])
def group_kernel(
    o, w, scales, out, parts, counters, rows, N, scale_stride,
    K: tl.constexpr, R: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    E8M0: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (tile of BN rows, part of K): o [rows <= M, N / R K], w [N, K] -> [rows, N]."""
    tile, part = tl.program_id(0), tl.program_id(1)
    STEPS: tl.constexpr = K // 128 // SPLITS
    first = part * STEPS
    m, k = tl.arange(0, M), tl.arange(0, 128)
    n = tile * BN + tl.arange(0, BN)
    live = (m < rows)[:, None]
    token = o + m.to(tl.int64)[:, None] * (N // R * K) + (tile * BN // R * K + first * 128)
    weight = w + n.to(tl.int64)[:, None] * K + first * 128
    row_scale = (tile * BN // 128) * scale_stride + first
    ahead = block_scale(scales, row_scale, E8M0)
    acc = tl.zeros([BN, M], tl.float32)
    for step in range(STEPS):
        scale = ahead  # the next one is on its way while this block is multiplied
        ahead = block_scale(scales, row_scale + tl.minimum(step + 1, STEPS - 1), E8M0)
        values = tl.load(token + step * 128 + k[None, :], mask=live, other=0.0)  # [M, 128]
        block = tl.load(weight + step * 128 + k[None, :])  # [BN, 128]
        product = tl.dot(
            e4m3_wide(block).to(WIDE), tl.trans(values.to(WIDE)), input_precision="ieee"
        )
        acc += product * scale
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
