"""The MXFP4 expert product for many pairs an expert, on Hopper, by way of shared memory (Gluon).

The arithmetic and the copies are those of `triton_pipelined`. There weights are unpacked into the
registers that the matrix unit reads; here a block is unpacked into one of two places in shared
memory while the one before is multiplied from the other.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from metainfer.ops.moe_experts.triton_pipelined import (
    _fetch,
    _finish,
    _places,
    _ring,
    _scale_rings,
    _unpacked,
)
from metainfer.ops.moe_experts.triton_wgmma import _barrier, _row


@gluon.jit
def _unpack(place, w_slot, four, ref, pick, BN: gl.constexpr, words: gl.constexpr):
    """A block of weights into `place`, for the matrix unit to see."""
    place.store(_unpacked(w_slot.load(words), four.load(words), ref, pick, BN))
    fence_async_shared()


@gluon.jit
def _block(
    q, q_scales, order, routes, w, scales, refs, out, limit, expert, first, count, tile,
    K: gl.constexpr, N: gl.constexpr, TOP: gl.constexpr, UP: gl.constexpr, BN: gl.constexpr,
    M: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Tile `tile` of BN weight rows by the `count` <= M pairs from place `first`."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 32])
    words: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    plain: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    eight: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    BLOCKS: gl.constexpr = K // 128
    w_at, x_at, x_live, s_at, xs_at, xs_live = _places(
        q, q_scales, order, w, scales, expert, first, count, tile, K, N, TOP, UP, BN, M, WARPS
    )  # fmt: skip
    rows = expert.to(gl.int64) * N
    rows = rows + _row(gl.arange(0, BN, gl.SliceLayout(1, words)), tile, N, BN, UP)
    ref = gl.load(refs + rows).to(gl.int32)[:, None]
    pick = (gl.arange(0, 16, gl.SliceLayout(0, words)) // 4 + 0x4440)[None, :]
    w_ring, x_ring = _ring(BN, M)
    s_ring, xs_ring = _scale_rings(2, BN, M)
    even = gl.allocate_shared_memory(gl.int32, [BN, 32], plain)
    odd = gl.allocate_shared_memory(gl.int32, [BN, 32], plain)
    places = (even, odd)
    for s in gl.static_range(3):
        _fetch(
            s, 0, w_ring[s], x_ring[s], s_ring, xs_ring, w_at, x_at, x_live, s_at, xs_at, xs_live,
            s == 0, BLOCKS,
        )  # fmt: skip
        async_copy.commit_group()
    acc = gl.zeros([BN, M], gl.float32, mma)
    zero = gl.zeros([BN, M], gl.float32, mma)
    async_copy.wait_group(2)
    _barrier()
    _unpack(even, w_ring[0], s_ring.index(0).slice(0, 1, 1), ref, pick, BN, words)
    for turn in range(BLOCKS // 4):
        more = turn + 1 < BLOCKS // 4
        for s in gl.static_range(4):
            block = turn * 4 + s
            async_copy.wait_group(1)  # the next block is there
            _barrier()  # for all warps, this one unpacked; none multiplies the one before
            part = warpgroup_mma(
                places[s % 2]._reinterpret(gl.float8e4nv, [BN, 128], eight),
                x_ring[s].permute((1, 0)), zero, use_acc=False, is_async=True,
            )  # fmt: skip
            if s < 1 or more:
                _fetch(
                    block + 3, (block + 3) // 4 % 2, w_ring[(s + 3) % 4], x_ring[(s + 3) % 4],
                    s_ring, xs_ring, w_at, x_at, x_live, s_at, xs_at, xs_live, (s + 3) % 4 == 0,
                    BLOCKS,
                )  # fmt: skip
            async_copy.commit_group()
            # past the last block this unpacks what nobody multiplies
            four = s_ring.index((block + 1) // 4 % 2).slice((s + 1) % 4, 1, 1)
            _unpack(places[(s + 1) % 2], w_ring[(s + 1) % 4], four, ref, pick, BN, words)
            scale = xs_ring.index(block // 4 % 2).slice(s % 4, 1, 1).permute((1, 0)).load(mma)
            part = warpgroup_mma_wait(0, deps=[part])
            acc += part * scale
    _barrier()  # what follows may lie where others still multiply
    _finish(
        acc, order, routes, refs, out, limit, expert, first, count, tile, N, UP, BN, M, WARPS
    )  # fmt: skip


@gluon.jit
def staged_kernel(
    q, q_scales, order, table, routes, w, scales, refs, out, limit,
    K: gl.constexpr, N: gl.constexpr, TOP: gl.constexpr, UP: gl.constexpr, BN: gl.constexpr,
    M: gl.constexpr, LEAST: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As `triton_pipelined.pipelined_kernel`, with Hopper's products."""
    tile, block = gl.program_id(0), gl.program_id(1)
    expert = gl.load(table + block * 3)
    first = gl.load(table + block * 3 + 1)
    count = gl.load(table + block * 3 + 2)
    if M > LEAST and count > LEAST:
        _block(
            q, q_scales, order, routes, w, scales, refs, out, limit, expert, first, count, tile,
            K, N, TOP, UP, BN, M, WARPS,
        )  # fmt: skip
    elif count > 0:
        _block(
            q, q_scales, order, routes, w, scales, refs, out, limit, expert, first, count, tile,
            K, N, TOP, UP, BN, LEAST, WARPS,
        )  # fmt: skip
