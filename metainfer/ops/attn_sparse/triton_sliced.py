"""Sparse attention where the matrix unit works synchronously: every warp has a slice of channels.

The same arithmetic as `triton.sparse_kernel`. There each warp multiplies some columns of a product,
so all of them read all queries again for every tile of keys, and shared memory is what they wait
for. Here a warp keeps its slice of the queries' channels in registers, multiplies it with the same
slice of the keys, and later sums its own slice of the values: a key is read twice, queries once.
What the slices' logits add up to passes through shared memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.attn_sparse.triton import _angles


@triton.jit
def _added(x, H: tl.constexpr, N: tl.constexpr):
    """x [8, H, N] summed over its slices, in pairs."""
    x = tl.reshape(tl.permute(x, (1, 2, 0)), [H, N, 2, 2, 2])
    a, b = tl.split(x)
    a, b = tl.split(a + b)
    a, b = tl.split(a + b)
    return a + b


@triton.jit(do_not_specialize=["width"])
def sliced_kernel(
    q, cache, places, counts, sinks, cos_sin, positions, out, parts, peaks, totals,
    factor, q_stride, width,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HB: tl.constexpr, N: tl.constexpr,
    SPLITS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    t, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    W: tl.constexpr = D // 8
    head = block * HB + tl.arange(0, HB)
    lane = (tl.arange(0, 8) * W)[:, None, None] + tl.arange(0, W)[None, None, :]
    heads = (head < H)[None, :, None]
    where = t.to(tl.int64) * q_stride + head[None, :, None] * D + lane
    tile = tl.load(q + where, mask=heads, other=0.0)  # [8, HB, W]
    count = tl.load(counts + t)
    if count > 0:
        tiles = tl.cdiv(count, N)
        share = tl.cdiv(tiles, SPLITS)
        begin = part * share
        end = tl.minimum(begin + share, tiles)
        peak = tl.full([1, HB], float("-inf"), tl.float32)
        total = tl.zeros([1, HB], tl.float32)
        mixed = tl.zeros([8, HB, W], tl.float32)
        mine = t.to(tl.int64) * width
        for step in range(begin, end):
            j = step * N + tl.arange(0, N)
            seen = j < count
            at = tl.multiple_of(tl.load(places + mine + j, mask=seen, other=0), 8)
            keys = tl.load(cache + at[None, :, None] + lane, mask=seen[None, :, None], other=0.0)
            across = tl.permute(keys, (0, 2, 1))  # keys [8, N, W]
            if EXACT:
                scores = tl.dot(tile, across, input_precision="ieee")
            else:
                scores = tl.dot(tile, across)
            scores = _added(scores, HB, N)[None, :, :] * factor
            scores = tl.where(seen[None, None, :], scores, float("-inf"))
            above = tl.maximum(peak, tl.max(scores, axis=2))
            weight = tl.exp2(scores - above[:, :, None])
            fade = tl.exp2(peak - above)
            total = total * fade + tl.sum(weight, axis=2)
            peak = above
            weight = tl.broadcast_to(weight.to(keys.dtype), [8, HB, N])
            mixed = mixed * fade[:, :, None]
            if EXACT:
                mixed += tl.dot(weight, keys, input_precision="ieee")
            else:
                mixed = tl.dot(weight, keys, mixed)
        peak, total = tl.reshape(peak, [HB]), tl.reshape(total, [HB])
        if SPLITS == 1:
            sink = tl.load(sinks + head, mask=head < H, other=0.0) * 1.4426950408889634
            above = tl.maximum(peak, sink)
            fade = tl.exp2(peak - above)
            total = total * fade + tl.exp2(sink - above)
            a, b = tl.split(tl.reshape(mixed * (fade / total)[None, :, None], [8, HB, W // 2, 2]))
            cos, sin = _angles(cos_sin, tl.load(positions + t), D, R)
            cos, sin = tl.reshape(cos, [8, 1, W // 2]), tl.reshape(sin, [8, 1, W // 2])
            result = tl.join(a * cos + b * sin, b * cos - a * sin)
            result = tl.reshape(result, [8, HB, W]).to(out.dtype.element_ty)
            where = (t.to(tl.int64) * H + head[None, :, None]) * D + lane
            tl.store(out + where, result, mask=heads)
        else:
            place = (t.to(tl.int64) * H + head) * SPLITS + part
            tl.store(peaks + place, peak, mask=head < H)
            if begin < end:
                tl.store(totals + place, total, mask=head < H)
                tl.store(parts + place[None, :, None] * D + lane, mixed, mask=heads)
