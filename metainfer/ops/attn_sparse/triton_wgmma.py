"""The sparse attention kernel for Hopper, with its layouts and its pipeline written out (Gluon).

The same arithmetic as `triton.sparse_kernel`. What is gained by hand: a tile of keys is copied into
shared memory once and read there by both products. A tile's values are summed while the next one
may still be on its way; the next one's logits follow in the matrix unit's queue, and behind them
the copies after next are issued.
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

# Gluon renames: 3.6 against 3.7 and newer, 3.7 against 3.8 and newer.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _after_the_launch_before():
    """Wait for what the launch before wrote, and let the launch after begin."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; // dummy $0", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _places_of(places, step, last, N: gl.constexpr, rows: gl.constexpr):
    """Where the keys of tile `step` begin; past the last key, the last again (its weight is 0)."""
    j = gl.minimum(step * N + gl.arange(0, N, rows), last)
    return gl.multiple_of(gl.load(places + j), 8)


@gluon.jit
def _weights(scores, step, count, factor, peak, N: gl.constexpr, columns: gl.constexpr):
    """(e^(l - m), the new maximum) of one tile, in powers of two."""
    j = step * N + gl.arange(0, N, columns)
    scores = gl.where((j < count)[None, :], scores, float("-inf"))
    above = gl.maximum(peak, gl.max(scores, axis=1) * factor)
    return gl.exp2(scores * factor - above[:, None]), above


@gluon.jit
def _turned_back(x, cos_sin, position, D: gl.constexpr, R: gl.constexpr):
    """x [H, D] with its last R channels turned by -position, pairs (2i, 2i + 1)."""
    a, b = gl.split(gl.reshape(x, [x.shape[0], D // 2, 2]))
    i = gl.arange(0, D // 2, gl.SliceLayout(0, a.type.layout)) - (D - R) // 2
    row = cos_sin + position * R + i
    cos = gl.load(row, mask=i >= 0, other=1.0)[None, :]
    sin = gl.load(row + R // 2, mask=i >= 0, other=0.0)[None, :]
    return gl.reshape(gl.join(a * cos + b * sin, b * cos - a * sin), x.shape)


@gluon.jit
def _item(item, H: gl.constexpr, HB: gl.constexpr, SPLITS: gl.constexpr):
    """(query, block of heads, part of the keys)."""
    block = item // SPLITS
    return block // (H // HB), block % (H // HB), item % SPLITS


@gluon.jit
def _tiles_of(count, part, N: gl.constexpr, SPLITS: gl.constexpr):
    """The tiles [begin, end) of a part."""
    tiles = gl.cdiv(count, N)
    share = gl.cdiv(tiles, SPLITS)
    return part * share, gl.minimum(part * share + share, tiles)


@gluon.jit(do_not_specialize=["items", "width"])
def sparse_kernel(
    q, cache, places, counts, sinks, cos_sin, positions, out, parts, peaks, totals, factor,
    items, q_stride, width,
    H: gl.constexpr, D: gl.constexpr, R: gl.constexpr, HB: gl.constexpr, N: gl.constexpr,
    SPLITS: gl.constexpr, WARPS: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Items of a query, HB of its heads and a part of its keys; HB is 64 and H a multiple of it.

    With SPLITS 1 a program may take several: while one ends, the next one's copies are on their
    way. CHAINED: launched while the kernel before still runs.
    """
    logits: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], [16, N // (WARPS // 4), 16]
    )
    values: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], [16, min(256, D // (WARPS // 4)), 16]
    )
    move: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, move)
    columns: gl.constexpr = gl.SliceLayout(0, logits)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tile = gl.allocate_shared_memory(q.dtype.element_ty, [HB, D], shared)
    ring = gl.allocate_shared_memory(q.dtype.element_ty, [2, N, D], shared)
    p_tile = gl.allocate_shared_memory(q.dtype.element_ty, [HB, N], shared)
    lane = gl.arange(0, D, gl.SliceLayout(0, move))[None, :]
    inside = gl.arange(0, HB, rows)[:, None] * D + lane
    t, block, part = _item(gl.program_id(0), H, HB, SPLITS)
    _copy(q_tile, q + t.to(gl.int64) * q_stride + block * HB * D + inside)
    if CHAINED:
        _after_the_launch_before()
    count = gl.load(counts + t)
    begin, end = _tiles_of(count, part, N, SPLITS)
    if begin < end:
        at = _places_of(places + t.to(gl.int64) * width, begin, count - 1, N, rows)
        _copy(ring.index(0), cache + at[:, None] + lane)
    async_copy.commit_group()
    first = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        # The queries are on their way, and their first tile of keys into place `first`.
        t, block, part = _item(item, H, HB, SPLITS)
        begin, end = _tiles_of(count, part, N, SPLITS)
        follower = item + gl.num_programs(0)
        next_t, next_block, _ = _item(follower, H, HB, SPLITS)
        next_q = q + next_t.to(gl.int64) * q_stride + next_block * HB * D
        next_count = gl.load(counts + next_t, mask=follower < items, other=0)
        head = block * HB + gl.arange(0, HB, gl.SliceLayout(1, logits))
        if begin < end:
            mine = places + t.to(gl.int64) * width
            last = count - 1
            later = _places_of(mine, begin + 1, last, N, rows)
            if begin + 1 < end:
                _copy(ring.index(1 - first), cache + later[:, None] + lane)
            async_copy.commit_group()
            later = _places_of(mine, begin + 2, last, N, rows)
            peak = gl.full([HB], float("-inf"), gl.float32, gl.SliceLayout(1, logits))
            none = gl.zeros([HB, N], gl.float32, logits)
            total = gl.zeros([HB, N], gl.float32, logits)  # of its columns once, at the end
            mixed = gl.zeros([HB, D], gl.float32, values)
            async_copy.wait_group(1)
            fence_async_shared()
            _barrier()
            scores = warpgroup_mma(
                q_tile, ring.index(first).permute((1, 0)), none, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            for step in range(begin, end - 1):
                slot = (first + step - begin) % 2
                weight, above = _weights(scores, step, count, factor, peak, N, columns)
                fade = gl.exp2(peak - above)
                peak = above
                total = total * fade[:, None] + weight
                p_tile.store(weight.to(q.dtype.element_ty))
                mixed = mixed * gl.convert_layout(fade, gl.SliceLayout(1, values))[:, None]
                fence_async_shared()
                _barrier()
                mixed = warpgroup_mma(p_tile, ring.index(slot), mixed, is_async=True)
                async_copy.wait_group(0)
                fence_async_shared()
                _barrier()
                scores = warpgroup_mma(
                    q_tile, ring.index(1 - slot).permute((1, 0)), none, use_acc=False, is_async=True
                )
                mixed = warpgroup_mma_wait(1, deps=[mixed])
                _barrier()
                if step + 2 < end:
                    _copy(ring.index(slot), cache + later[:, None] + lane)
                async_copy.commit_group()
                later = _places_of(mine, step + 3, last, N, rows)
                scores = warpgroup_mma_wait(0, deps=[scores])
            slot = (first + end - 1 - begin) % 2
            first = 1 - slot
            if next_count > 0:
                later = _places_of(places + next_t.to(gl.int64) * width, 0, next_count - 1, N, rows)
            weight, above = _weights(scores, end - 1, count, factor, peak, N, columns)
            fade = gl.exp2(peak - above)
            total = gl.sum(total * fade[:, None] + weight, axis=1)
            p_tile.store(weight.to(q.dtype.element_ty))
            mixed = mixed * gl.convert_layout(fade, gl.SliceLayout(1, values))[:, None]
            fence_async_shared()
            _barrier()
            mixed = warpgroup_mma(p_tile, ring.index(slot), mixed, is_async=True)
            if next_count > 0:
                _copy(q_tile, next_q + inside)
                _copy(ring.index(first), cache + later[:, None] + lane)
            async_copy.commit_group()
            if SPLITS == 1:
                sink = gl.load(sinks + head) * 1.4426950408889634
                highest = gl.maximum(above, sink)
                fade = gl.exp2(above - highest)
                scale = fade / (total * fade + gl.exp2(sink - highest))
                position = gl.load(positions + t)
                mixed = warpgroup_mma_wait(0, deps=[mixed])
                result = mixed * gl.convert_layout(scale, gl.SliceLayout(1, values))[:, None]
                result = _turned_back(result, cos_sin, position, D, R)
                # Through the last keys' place, so that a warp writes whole lines.
                _barrier()
                stage = ring.index(slot)
                stage.store(gl.convert_layout(result, values).to(q.dtype.element_ty))
                _barrier()
                to = out + (t.to(gl.int64) * H + block * HB) * D
                gl.store(to + inside, stage.load(move))
                _barrier()
            else:
                place = (t.to(gl.int64) * H + head) * SPLITS + part
                gl.store(peaks + place, above)
                gl.store(totals + place, total)
                mixed = warpgroup_mma_wait(0, deps=[mixed])
                row = t.to(gl.int64) * H + block * HB + gl.arange(0, HB, gl.SliceLayout(1, values))
                row = row * SPLITS + part
                column = gl.arange(0, D, gl.SliceLayout(0, values))
                gl.store(parts + row[:, None] * D + column[None, :], mixed)
        else:
            if SPLITS > 1:
                nothing = gl.full([HB], float("-inf"), gl.float32, gl.SliceLayout(1, logits))
                gl.store(peaks + (t.to(gl.int64) * H + head) * SPLITS + part, nothing)
            async_copy.wait_group(0)  # of queries that nothing is done with
            _barrier()
            if next_count > 0:
                later = _places_of(places + next_t.to(gl.int64) * width, 0, next_count - 1, N, rows)
                _copy(q_tile, next_q + inside)
                _copy(ring.index(first), cache + later[:, None] + lane)
            async_copy.commit_group()
        count = next_count
