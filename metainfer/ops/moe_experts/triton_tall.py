"""The MXFP4 expert product for many pairs an expert, on Hopper: two tiles of rows each (Gluon).

The arithmetic and the copies are those of `triton_pipelined`. What binds there at thousands of
tokens is the way of activations through L2 and warps that all multiply, then all unpack. Here a
block of activations serves twice as many weight rows: while the warps of one group unpack a half
and add up, those of another multiply. An operand in registers holds its warp until the matrix unit
has read it, so nothing is unpacked ahead.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from metainfer.ops.moe_experts.triton_pipelined import (
    _elements,
    _fetch,
    _finish,
    _places,
    _ring,
    _scale_rings,
    _unpacked,
)
from metainfer.ops.moe_experts.triton_wgmma import _barrier, _row


@gluon.jit
def _half(
    acc, zero, w_slot, four, x, scale, ref, pick,
    h: gl.constexpr, H: gl.constexpr, words: gl.constexpr, left: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """`acc` [H, M] and what the block gives to the rows of half `h`."""
    packed = w_slot.slice(h * H, H, 0).load(words)
    a = _unpacked(packed, four.slice(h * H, H, 0).load(words), ref, pick, H)
    part = warpgroup_mma(_elements(a, left, H), x, zero, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    return acc + part * scale.load(mma)


@gluon.jit
def _block(
    q, q_scales, order, routes, w, scales, refs, out, limit, expert, first, count, tile,
    K: gl.constexpr, N: gl.constexpr, TOP: gl.constexpr, UP: gl.constexpr, BN: gl.constexpr,
    M: gl.constexpr, U: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Tile `tile` of BN weight rows by the `count` <= M pairs from place `first`."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 32])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    words: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    H: gl.constexpr = BN // 2
    AHEAD: gl.constexpr = 4 - U
    BLOCKS: gl.constexpr = K // 128
    w_at, x_at, x_live, s_at, xs_at, xs_live = _places(
        q, q_scales, order, w, scales, expert, first, count, tile, K, N, TOP, UP, BN, M, WARPS
    )  # fmt: skip
    base = expert.to(gl.int64) * N
    rows = gl.arange(0, H, gl.SliceLayout(1, words))
    ref0 = gl.load(refs + base + _row(rows, 2 * tile, N, H, UP)).to(gl.int32)[:, None]
    ref1 = gl.load(refs + base + _row(rows, 2 * tile + 1, N, H, UP)).to(gl.int32)[:, None]
    pick = (gl.arange(0, 16, gl.SliceLayout(0, words)) // 4 + 0x4440)[None, :]
    w_ring, x_ring = _ring(BN, M)
    s_ring, xs_ring = _scale_rings(2, BN, M)
    for s in gl.static_range(AHEAD):
        _fetch(
            s, 0, w_ring[s], x_ring[s], s_ring, xs_ring, w_at, x_at, x_live, s_at, xs_at, xs_live,
            s == 0, BLOCKS,
        )  # fmt: skip
        if s % U == U - 1:
            async_copy.commit_group()
    acc0 = gl.zeros([H, M], gl.float32, mma)
    acc1 = gl.zeros([H, M], gl.float32, mma)
    zero = gl.zeros([H, M], gl.float32, mma)
    for turn in range(BLOCKS // 4):
        more = turn + 1 < BLOCKS // 4
        for s in gl.static_range(4):
            block = turn * 4 + s
            if s % U == 0:
                async_copy.wait_group(4 // U - 2)
                _barrier()  # the blocks are there for all warps, none reads those before
                for u in gl.static_range(U):
                    if s + u + AHEAD < 4 or more:
                        _fetch(
                            block + u + AHEAD, (block + u + AHEAD) // 4 % 2,
                            w_ring[(s + u + AHEAD) % 4], x_ring[(s + u + AHEAD) % 4], s_ring,
                            xs_ring, w_at, x_at, x_live, s_at, xs_at, xs_live,
                            (s + u + AHEAD) % 4 == 0, BLOCKS,
                        )  # fmt: skip
                async_copy.commit_group()
            x = x_ring[s].permute((1, 0))
            four = s_ring.index(block // 4 % 2).slice(s % 4, 1, 1)
            scale = xs_ring.index(block // 4 % 2).slice(s % 4, 1, 1).permute((1, 0))
            acc0 = _half(acc0, zero, w_ring[s], four, x, scale, ref0, pick, 0, H, words, left, mma)
            acc1 = _half(acc1, zero, w_ring[s], four, x, scale, ref1, pick, 1, H, words, left, mma)
    _barrier()  # what follows may lie where others still multiply
    _finish(
        acc0, order, routes, refs, out, limit, expert, first, count, 2 * tile, N, UP, H, M, WARPS
    )  # fmt: skip
    _finish(
        acc1, order, routes, refs, out, limit, expert, first, count, 2 * tile + 1, N, UP, H, M,
        WARPS,
    )  # fmt: skip


@gluon.jit
def tall_kernel(
    q, q_scales, order, table, routes, w, scales, refs, out, limit,
    K: gl.constexpr, N: gl.constexpr, TOP: gl.constexpr, UP: gl.constexpr, BN: gl.constexpr,
    M: gl.constexpr, LEAST: gl.constexpr, U: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As `triton_pipelined.pipelined_kernel`, with Hopper's products."""
    tile, block = gl.program_id(0), gl.program_id(1)
    expert = gl.load(table + block * 3)
    first = gl.load(table + block * 3 + 1)
    count = gl.load(table + block * 3 + 2)
    if M > LEAST and count > LEAST:
        _block(
            q, q_scales, order, routes, w, scales, refs, out, limit, expert, first, count, tile,
            K, N, TOP, UP, BN, M, U, WARPS,
        )  # fmt: skip
    elif count > 0:
        _block(
            q, q_scales, order, routes, w, scales, refs, out, limit, expert, first, count, tile,
            K, N, TOP, UP, BN, LEAST, U, WARPS,
        )  # fmt: skip
