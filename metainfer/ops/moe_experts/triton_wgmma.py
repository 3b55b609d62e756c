"""The MXFP4 expert product for Hopper, with its layouts written out (Gluon).

The same arithmetic as `triton_mxfp4` (see there for the look-up table and the order of channels).
What is gained by hand: packed weights go from shared memory straight into the registers of the
matrix unit's left operand, are unpacked there and multiplied by FP8 wgmma, one barrier a stage.
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

from metainfer.ops.moe_experts.tiles import OPERANDS, UNPACK

# Gluon renames: 3.6 against 3.7 and newer, 3.7 against 3.8 and newer.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_UNPACK = gl.constexpr(UNPACK)
_OPERANDS = gl.constexpr(OPERANDS)


@gluon.jit
def _fetch(
    stage, slot, w_at, x_at, x_live, s_at, xs_at, xs_live, w_ring, x_ring, s_ring, xs_ring,
    U: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Start the copies of `stage` (U blocks of 128 channels) into ring place `slot`; SCALES: and
    the scales of the four blocks that begin with it (16 bytes of a row: a sector serves few)."""
    _copy(w_ring.index(slot), w_at + stage * (U * 32))
    _copy(x_ring.index(slot), x_at + stage * (U * 128), mask=x_live)
    if SCALES:
        group = stage * U // 4
        _copy(s_ring.index(group % 2), s_at + group * 4)
        _copy(xs_ring.index(group % 2), xs_at + group * 4, mask=xs_live)


@gluon.jit
def _multiply(
    slot, w_ring, x_ring, four, ref, pick, zero,
    u: gl.constexpr, BN: gl.constexpr, M: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """Unpack block `u` of a stage and start its four products; the sum of 128 channels."""
    packed = w_ring.index(slot).slice(u * BN, BN, 0).load(left)
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        _UNPACK, _OPERANDS, [packed, four, ref, pick],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip
    x = x_ring.index(slot)
    part = warpgroup_mma(
        w0.to(gl.float8e4nv, bitcast=True), x.slice(4 * u * M, M, 0).permute((1, 0)),
        zero, use_acc=False, is_async=True,
    )  # fmt: skip
    part = warpgroup_mma(
        w1.to(gl.float8e4nv, bitcast=True), x.slice((4 * u + 1) * M, M, 0).permute((1, 0)),
        part, is_async=True,
    )  # fmt: skip
    part = warpgroup_mma(
        w2.to(gl.float8e4nv, bitcast=True), x.slice((4 * u + 2) * M, M, 0).permute((1, 0)),
        part, is_async=True,
    )  # fmt: skip
    return warpgroup_mma(
        w3.to(gl.float8e4nv, bitcast=True), x.slice((4 * u + 3) * M, M, 0).permute((1, 0)),
        part, is_async=True,
    )  # fmt: skip


@gluon.jit
def _row(r, tile, N: gl.constexpr, BN: gl.constexpr, UP: gl.constexpr):
    """The expert's weight row behind row r of a tile: gate and up of a channel stand 8 apart."""
    if UP:
        r = tile * (BN // 2) + r // 16 * 8 + r % 8 + r % 16 // 8 * (N // 2)
    else:
        r = tile * BN + r
    return r


@gluon.jit
def experts_kernel(
    q, q_scales, order, table, routes, w, scales, refs, out, limit,
    K: gl.constexpr, N: gl.constexpr, TOP: gl.constexpr, UP: gl.constexpr, BN: gl.constexpr,
    M: gl.constexpr, U: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Program (tile of BN rows, block of M pairs) of one expert; `table` [blocks, 3]: expert, first
    place in `order`, pairs. UP: N / 2 hidden channels are written at sorted places; otherwise N
    channels at the pair's own."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 32])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    w_copy: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [WARPS, 1], [1, 0])
    s_copy: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    tile, block = gl.program_id(0), gl.program_id(1)
    expert = gl.load(table + block * 3)
    first = gl.load(table + block * 3 + 1)
    count = gl.load(table + block * 3 + 2)
    if count > 0:
        # which weight rows this program multiplies: gate and up of a channel 8 rows apart
        base = expert.to(gl.int64) * N
        copy_r = gl.arange(0, U * BN, gl.SliceLayout(1, w_copy))
        copy_m = gl.arange(0, 4 * U * M, gl.SliceLayout(1, x_copy))
        row = base + _row(copy_r % BN, tile, N, BN, UP)
        cols = gl.arange(0, 32, gl.SliceLayout(0, w_copy))
        w_at = w + (row * (K // 4) + copy_r // BN * 32)[:, None] + cols[None, :]
        four_cols = gl.arange(0, 4, gl.SliceLayout(0, s_copy))[None, :]
        s_row = base + _row(gl.arange(0, BN, gl.SliceLayout(1, s_copy)), tile, N, BN, UP)
        s_at = scales + (s_row * (K // 128))[:, None] + four_cols
        s_m = gl.arange(0, M, gl.SliceLayout(1, s_copy))
        token = first + copy_m % M
        s_token = first + s_m
        x_live = copy_m % M < count
        xs_live = s_m < count
        if UP:
            token = gl.load(order + token, mask=x_live, other=0) // TOP
            s_token = gl.load(order + s_token, mask=xs_live, other=0) // TOP
        bytes_ = gl.arange(0, 32, gl.SliceLayout(0, x_copy))
        x_at = q + (token.to(gl.int64) * K + copy_m // M * 32)[:, None] + bytes_[None, :]
        xs_at = q_scales + (s_token.to(gl.int64) * (K // 128))[:, None] + four_cols
        x_live = x_live[:, None]
        xs_live = xs_live[:, None]

        w_shared: gl.constexpr = gl.SwizzledSharedLayout(16, 2, 2, [1, 0])
        x_shared: gl.constexpr = gl.NVMMASharedLayout(32, 8, 2)
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        w_ring = gl.allocate_shared_memory(gl.int16, [STAGES, U * BN, 32], w_shared)
        x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 4 * U * M, 32], x_shared)
        s_ring = gl.allocate_shared_memory(gl.int32, [2, BN, 4], flat)
        xs_ring = gl.allocate_shared_memory(gl.float32, [2, M, 4], flat)

        SUB: gl.constexpr = 4 // U  # stages that share scales
        AHEAD: gl.constexpr = STAGES - 1
        STEPS: gl.constexpr = K // 128 // U
        for s in gl.static_range(AHEAD):
            _fetch(
                s, s, w_at, x_at, x_live, s_at, xs_at, xs_live, w_ring, x_ring, s_ring, xs_ring,
                U, s % SUB == 0,
            )  # fmt: skip
            async_copy.commit_group()
        rows = _row(gl.arange(0, BN, gl.SliceLayout(1, left)), tile, N, BN, UP)
        ref = gl.load(refs + base + rows).to(gl.int32)[:, None]
        pick = (gl.arange(0, 32, gl.SliceLayout(0, left)) // 8 + 0x4440)[None, :]
        acc = gl.zeros([BN, M], gl.float32, mma)
        zero = gl.zeros([BN, M], gl.float32, mma)
        for group in range(K // 512):
            for sub in gl.static_range(SUB):
                step = group * SUB + sub
                async_copy.wait_group(AHEAD - 1)
                fence_async_shared()
                _barrier()
                ahead = step + AHEAD
                if ahead < STEPS:
                    _fetch(
                        ahead, ahead % STAGES, w_at, x_at, x_live, s_at, xs_at, xs_live, w_ring,
                        x_ring, s_ring, xs_ring, U, (sub + AHEAD) % SUB == 0,
                    )  # fmt: skip
                async_copy.commit_group()
                slot = step % STAGES
                for u in gl.static_range(U):
                    four = s_ring.index(group % 2).slice(sub * U + u, 1, 1).load(left)
                    part = _multiply(slot, w_ring, x_ring, four, ref, pick, zero, u, BN, M, left)
                    part = warpgroup_mma_wait(0, deps=[part])
                    scale = (
                        xs_ring.index(group % 2).slice(sub * U + u, 1, 1).permute((1, 0)).load(mma)
                    )
                    acc += part * scale
        out_rows = _row(gl.arange(0, BN, gl.SliceLayout(1, mma)), tile, N, BN, UP)
        last = gl.load(refs + base + out_rows).to(gl.int32)
        acc = acc * ((last - 6) << 23).to(gl.float32, bitcast=True)[:, None]
        store: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, WARPS], [0, 1])
        p = gl.arange(0, M, gl.SliceLayout(0, store))
        p_live = p < count
        if UP:
            gate, up = gl.split(
                gl.permute(gl.reshape(acc, [BN // 16, 2, 8, M]), (0, 2, 3, 1))
            )  # fmt: skip
            gate = gl.convert_layout(gl.reshape(gate, [BN // 2, M]), store)
            up = gl.convert_layout(gl.reshape(up, [BN // 2, M]), store)
            pair = gl.load(order + first + p, mask=p_live, other=0)
            route = gl.load(routes + pair, mask=p_live, other=0.0)
            gate = gl.minimum(gate, limit)
            up = gl.minimum(gl.maximum(up, -limit), limit)
            value = gate / (1.0 + gl.exp(-gate)) * up * route[None, :]
            f = tile * (BN // 2) + gl.arange(0, BN // 2, gl.SliceLayout(1, store))
            where = ((first + p).to(gl.int64) * (N // 2))[None, :] + f[:, None]
            gl.store(out + where, value.to(out.dtype.element_ty), mask=p_live[None, :])
        else:
            value = gl.convert_layout(acc, store)
            pair = gl.load(order + first + p, mask=p_live, other=0)
            d = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, store))
            where = (pair.to(gl.int64) * N)[None, :] + d[:, None]
            gl.store(out + where, value.to(out.dtype.element_ty), mask=p_live[None, :])
