"""The MXFP4 expert product, unpacking beside products, layouts written out (Gluon).

The arithmetic, the look-up table and the order of channels are those of `triton_mxfp4`, the rows of
a tile those of `triton_wgmma`. WGMMA: Hopper's product; otherwise that of every card with e4m3.
While a block of 128 channels is multiplied, the weights of the next are unpacked into other
registers. Activations lie in whole lines of 128 bytes, one product of 128 channels. Every place of
the ring is an array of its own, so that the compiler sees which is read and which is filled, and
one barrier a block is enough. No proxy fence stands between copies and products, as none does in
what Triton makes of a loop of its own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from metainfer.ops.moe_experts.tiles import OPERANDS_WORDS, UNPACK_WORDS
from metainfer.ops.moe_experts.triton_wgmma import _barrier, _copy, _row

_UNPACK = gl.constexpr(UNPACK_WORDS)
_OPERANDS = gl.constexpr(OPERANDS_WORDS)


@gluon.jit
def _unpacked(packed, four, ref, pick, BN: gl.constexpr):
    """e4m3, four in an int32, [BN, 32] of a packed block [BN, 16], in the activations' order."""
    low, high = gl.inline_asm_elementwise(
        _UNPACK, _OPERANDS, [packed, four, ref, pick], dtype=(gl.int32, gl.int32), is_pure=True,
        pack=2,
    )  # fmt: skip
    four = gl.join(low, high)  # output 2 j + i at [:, 2 c + i, j]
    four = gl.permute(gl.reshape(four, [BN, 8, 2, 2]), (0, 3, 2, 1))
    return gl.reshape(four, [BN, 32])


@gluon.jit
def _elements(four, left: gl.constexpr, BN: gl.constexpr):
    """The same as e4m3 [BN, 128]: no instruction, another type."""
    four = gl.join(gl.join(four, four), gl.join(four, four))
    x = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [gl.reshape(four, [BN, 128])],
        dtype=gl.int8, is_pure=True, pack=4,
    )  # fmt: skip
    return gl.convert_layout(x, left, assert_trivial=True).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _four_of(kind: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Four arrays in shared memory that the compiler tells apart."""
    return (
        gl.allocate_shared_memory(kind, shape, layout),
        gl.allocate_shared_memory(kind, shape, layout),
        gl.allocate_shared_memory(kind, shape, layout),
        gl.allocate_shared_memory(kind, shape, layout),
    )


@gluon.jit
def _fetch(
    block, place, w_slot, x_slot, s_ring, xs_ring, w_at, x_at, x_live, s_at, xs_at, xs_live,
    SCALES: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Start the copies of a block of 128 channels, one of BLOCKS; SCALES: and, into their ring's
    `place`, of the scales of the four that begin with it (16 bytes of a row: a sector serves few).
    """
    _copy(w_slot, w_at + block * 16)
    _copy(x_slot, x_at + block * 128, mask=x_live)
    if SCALES and BLOCKS % 4 == 0:
        _copy(s_ring.index(place), s_at + block)
        _copy(xs_ring.index(place), xs_at + block, mask=xs_live)
    elif SCALES:  # a row ends within the last four
        s_cols: gl.constexpr = gl.SliceLayout(0, s_at.type.layout)
        xs_cols: gl.constexpr = gl.SliceLayout(0, xs_at.type.layout)
        s_held = (gl.arange(0, 4, s_cols) + block < BLOCKS)[None, :]
        xs_held = (gl.arange(0, 4, xs_cols) + block < BLOCKS)[None, :]
        _copy(s_ring.index(place), s_at + block, mask=s_held)
        _copy(xs_ring.index(place), xs_at + block, mask=xs_live & xs_held)


@gluon.jit
def _places(
    q, q_scales, order, w, scales, expert, first, count, tile,
    K: gl.constexpr, N: gl.constexpr, TOP: gl.constexpr, UP: gl.constexpr, BN: gl.constexpr,
    M: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Where a tile of BN rows by `count` <= M pairs reads: weights, tokens, scales of both."""
    w_copy: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    s_copy: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    xs_copy: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])
    base = expert.to(gl.int64) * N
    w_row = base + _row(gl.arange(0, BN, gl.SliceLayout(1, w_copy)), tile, N, BN, UP)
    w_at = w + (w_row * (K // 8))[:, None] + gl.arange(0, 16, gl.SliceLayout(0, w_copy))[None, :]
    s_row = base + _row(gl.arange(0, BN, gl.SliceLayout(1, s_copy)), tile, N, BN, UP)
    s_at = scales + (s_row * (K // 128))[:, None]
    s_at = s_at + gl.arange(0, 4, gl.SliceLayout(0, s_copy))[None, :]
    x_m = gl.arange(0, M, gl.SliceLayout(1, x_copy))
    xs_m = gl.arange(0, M, gl.SliceLayout(1, xs_copy))
    x_live, xs_live = x_m < count, xs_m < count
    token, xs_token = first + x_m, first + xs_m
    if UP:
        token = gl.load(order + token, mask=x_live, other=0) // TOP
        xs_token = gl.load(order + xs_token, mask=xs_live, other=0) // TOP
    x_at = q + (token.to(gl.int64) * K)[:, None]
    x_at = x_at + gl.arange(0, 128, gl.SliceLayout(0, x_copy))[None, :]
    xs_at = q_scales + (xs_token.to(gl.int64) * (K // 128))[:, None]
    xs_at = xs_at + gl.arange(0, 4, gl.SliceLayout(0, xs_copy))[None, :]
    return w_at, x_at, x_live[:, None], s_at, xs_at, xs_live[:, None]


@gluon.jit
def _ring(BN: gl.constexpr, M: gl.constexpr):
    """Places of four blocks' weights and activations."""
    w_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
    x_shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    w_ring = _four_of(gl.int32, [BN, 16], w_shared)
    x_ring = _four_of(gl.float8e4nv, [M, 128], x_shared)
    return w_ring, x_ring


@gluon.jit
def _scale_rings(PLACES: gl.constexpr, BN: gl.constexpr, M: gl.constexpr):
    """Places of the scales of four blocks each: weights' by rows, activations' by columns."""
    rows_of: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    columns_of: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    s_ring = gl.allocate_shared_memory(gl.int32, [PLACES, BN, 4], rows_of)
    xs_ring = gl.allocate_shared_memory(gl.float32, [PLACES, M, 4], columns_of)
    return s_ring, xs_ring


@gluon.jit
def _finish(
    acc, order, routes, refs, out, limit, expert, first, count, tile,
    N: gl.constexpr, UP: gl.constexpr, BN: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The sums [BN, M] times their rows' factor; UP: clamp, SwiGLU, routing weight; written."""
    mma: gl.constexpr = acc.type.layout
    base = expert.to(gl.int64) * N
    last = gl.load(
        refs + base + _row(gl.arange(0, BN, gl.SliceLayout(1, mma)), tile, N, BN, UP)
    ).to(gl.int32)
    acc = acc * ((last - 6) << 23).to(gl.float32, bitcast=True)[:, None]
    store: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, WARPS], [0, 1])
    p = gl.arange(0, M, gl.SliceLayout(0, store))
    p_live = p < count
    pair = gl.load(order + first + p, mask=p_live, other=0)
    if UP:
        gate, up = gl.split(gl.permute(gl.reshape(acc, [BN // 16, 2, 8, M]), (0, 2, 3, 1)))
        gate = gl.convert_layout(gl.reshape(gate, [BN // 2, M]), store)
        up = gl.convert_layout(gl.reshape(up, [BN // 2, M]), store)
        route = gl.load(routes + pair, mask=p_live, other=0.0)
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        value = gate / (1.0 + gl.exp(-gate)) * up * route[None, :]
        f = tile * (BN // 2) + gl.arange(0, BN // 2, gl.SliceLayout(1, store))
        where = ((first + p).to(gl.int64) * (N // 2))[None, :] + f[:, None]
    else:
        value = gl.convert_layout(acc, store)
        d = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, store))
        where = (pair.to(gl.int64) * N)[None, :] + d[:, None]
    gl.store(out + where, value.to(out.dtype.element_ty), mask=p_live[None, :])


@gluon.jit
def _step(
    acc, a, zero, block, more, w_ring, x_ring, s_ring, xs_ring, w_at, x_at, x_live, s_at, xs_at,
    xs_live, ref, pick, s: gl.constexpr, FETCH: gl.constexpr, BLOCKS: gl.constexpr,
    BN: gl.constexpr, WGMMA: gl.constexpr,
):  # fmt: skip
    """`acc` and the products of `block`, in place `s` of the ring and unpacked in `a`; the next
    block, unpacked meanwhile. FETCH or `more`: the block that the ring has room for is copied."""
    RING: gl.constexpr = len(w_ring)
    AHEAD: gl.constexpr = RING - 1
    PLACES: gl.constexpr = RING // 2
    mma: gl.constexpr = acc.type.layout
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    words: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    now = _elements(a, left, BN)
    x = x_ring[s % RING].permute((1, 0))
    if WGMMA:
        part = warpgroup_mma(now, x, zero, use_acc=False, is_async=True)
    async_copy.wait_group(AHEAD - 2)  # the next block is there, for all warps
    _barrier()
    # past the last block this unpacks what nobody multiplies
    four = s_ring.index((block + 1) // 4 % PLACES).slice((s + 1) % 4, 1, 1).load(words)
    a = _unpacked(w_ring[(s + 1) % RING].load(words), four, ref, pick, BN)
    if FETCH or more:
        _fetch(
            block + AHEAD, (block + AHEAD) // 4 % PLACES, w_ring[(s + AHEAD) % RING],
            x_ring[(s + AHEAD) % RING], s_ring, xs_ring, w_at, x_at, x_live, s_at, xs_at, xs_live,
            (s + AHEAD) % 4 == 0, BLOCKS,
        )  # fmt: skip
    async_copy.commit_group()
    scale = xs_ring.index(block // 4 % PLACES).slice(s % 4, 1, 1)
    scale = scale.permute((1, 0)).load(mma)
    if WGMMA:
        part = warpgroup_mma_wait(0, deps=[part])
    else:
        part = mma_v2(now, x.load(right), zero)
    return acc + part * scale, a


@gluon.jit
def _block(
    q, q_scales, order, routes, w, scales, refs, out, limit, expert, first, count, tile,
    K: gl.constexpr, N: gl.constexpr, TOP: gl.constexpr, UP: gl.constexpr, BN: gl.constexpr,
    M: gl.constexpr, RING: gl.constexpr, WARPS: gl.constexpr,
    WGMMA: gl.constexpr,
):  # fmt: skip
    """Tile `tile` of BN weight rows by the `count` <= M pairs from place `first`."""
    hopper: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 32])
    others: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    mma: gl.constexpr = hopper if WGMMA else others
    words: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    w_at, x_at, x_live, s_at, xs_at, xs_live = _places(
        q, q_scales, order, w, scales, expert, first, count, tile, K, N, TOP, UP, BN, M, WARPS
    )  # fmt: skip
    rows = expert.to(gl.int64) * N
    rows = rows + _row(gl.arange(0, BN, gl.SliceLayout(1, words)), tile, N, BN, UP)
    ref = gl.load(refs + rows).to(gl.int32)[:, None]
    AHEAD: gl.constexpr = RING - 1
    PLACES: gl.constexpr = RING // 2  # of scales: those of four blocks each
    w_ring, x_ring = _ring(BN, M)
    if RING == 8:
        w_more, x_more = _ring(BN, M)
        w_ring, x_ring = w_ring + w_more, x_ring + x_more
    s_ring, xs_ring = _scale_rings(PLACES, BN, M)
    BLOCKS: gl.constexpr = K // 128
    TURNS: gl.constexpr = BLOCKS // RING if BLOCKS >= 2 * RING else 0  # of one, Triton 3.6 dies
    LEFT: gl.constexpr = BLOCKS - TURNS * RING
    for s in gl.static_range(AHEAD):
        if s < BLOCKS:
            _fetch(
                s, s // 4, w_ring[s], x_ring[s], s_ring, xs_ring, w_at, x_at, x_live, s_at, xs_at,
                xs_live, s % 4 == 0, BLOCKS,
            )  # fmt: skip
        async_copy.commit_group()
    pick = (gl.arange(0, 16, gl.SliceLayout(0, words)) // 4 + 0x4440)[None, :]
    acc = gl.zeros([BN, M], gl.float32, mma)
    zero = gl.zeros([BN, M], gl.float32, mma)
    async_copy.wait_group(AHEAD - 1)
    _barrier()
    four = s_ring.index(0).slice(0, 1, 1).load(words)
    a = _unpacked(w_ring[0].load(words), four, ref, pick, BN)
    for turn in range(TURNS):
        for s in gl.static_range(RING):
            acc, a = _step(
                acc, a, zero, turn * RING + s, turn + 1 < TURNS, w_ring, x_ring, s_ring,
                xs_ring, w_at, x_at, x_live, s_at, xs_at, xs_live, ref, pick, s,
                s + AHEAD < RING + LEFT, BLOCKS, BN, WGMMA,
            )  # fmt: skip
    for s in gl.static_range(LEFT):
        acc, a = _step(
            acc, a, zero, BLOCKS - LEFT + s, False, w_ring, x_ring, s_ring, xs_ring, w_at, x_at,
            x_live, s_at, xs_at, xs_live, ref, pick, s, s + AHEAD < LEFT, BLOCKS, BN, WGMMA,
        )  # fmt: skip
    _barrier()  # what follows may lie where others still multiply
    _finish(
        acc, order, routes, refs, out, limit, expert, first, count, tile, N, UP, BN, M, WARPS
    )  # fmt: skip


@gluon.jit
def pipelined_kernel(
    q, q_scales, order, table, routes, w, scales, refs, out, limit,
    K: gl.constexpr, N: gl.constexpr, TOP: gl.constexpr, UP: gl.constexpr, BN: gl.constexpr,
    M: gl.constexpr, LEAST: gl.constexpr, RING: gl.constexpr, WARPS: gl.constexpr,
    WGMMA: gl.constexpr,
):  # fmt: skip
    """As `triton_wgmma.experts_kernel`: program (tile of BN rows, block of up to M pairs); an int32
    of `w` holds eight elements. A block of up to LEAST pairs takes a tile of LEAST."""
    tile, block = gl.program_id(0), gl.program_id(1)
    expert = gl.load(table + block * 3)
    first = gl.load(table + block * 3 + 1)
    count = gl.load(table + block * 3 + 2)
    if M > LEAST and count > LEAST:
        _block(
            q, q_scales, order, routes, w, scales, refs, out, limit, expert, first, count, tile,
            K, N, TOP, UP, BN, M, RING, WARPS, WGMMA,
        )  # fmt: skip
    elif count > 0:
        _block(
            q, q_scales, order, routes, w, scales, refs, out, limit, expert, first, count, tile,
            K, N, TOP, UP, BN, LEAST, RING, WARPS, WGMMA,
        )  # fmt: skip
