"""The lightning indexer's scores in Triton.

Scores are whole numbers here: a float32's bits, put in the order of the floats they stand for (NaN
first, one zero), so that comparing is exact and ties are equal. They are written with the largest
of every `GROUP` neighbours, by which `triton_select` chooses. Nothing depends on the number of
programs, and no length is asked from the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.triton_order import ordered
from metainfer.ops.triton_rows import row_sequence

_LEAST = tl.constexpr(-(1 << 31))  # below every score


@triton.jit
def _element(bits):
    """e2m1 in bits 22 to 24 and the sign of a float32, as float32: subnormal until multiplied."""
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _keys(
    data, page, offset, seen, FROM: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BYTES: tl.constexpr, LAYOUT: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Channels FROM .. FROM + WIDE of the keys at places of pages: [N, WIDE]; those from D on,
    of half bytes alone, are zeros. A page of a scaled form holds the values of all its entries,
    then their scales."""
    N: tl.constexpr = page.shape[0]
    if LAYOUT == 0:
        at = (page * PAGE + offset) * D + FROM
        lane = tl.arange(0, WIDE)
        keys = tl.load(data + at[:, None] + lane[None, :], mask=seen[:, None], other=0.0)
    elif LAYOUT == 8:
        at = page * BYTES + offset * D + FROM
        lane = tl.arange(0, WIDE)
        code = tl.load(data + at[:, None] + lane[None, :], mask=seen[:, None], other=0)
        code = code.to(tl.int32)
        bits = (code & 0x7F) << 20 | (code & 0x80) << 24
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        keys = tl.where(code & 0x7F == 0x7F, float("nan"), value).to(KIND)
    else:
        HALF: tl.constexpr = D // 2
        at = page * BYTES + offset * HALF + FROM // 2
        lane, group = tl.arange(0, WIDE // 2), tl.arange(0, WIDE // GROUP)
        held, scaled = seen[:, None], seen[:, None]
        if WIDE > D:
            held = held & (lane < HALF)[None, :]
            scaled = scaled & (group < D // GROUP)[None, :]
        both = tl.load(data + at[:, None] + lane[None, :], mask=held, other=0).to(tl.int32)
        scale_at = page * BYTES + PAGE * HALF + offset * (D // GROUP) + FROM // GROUP
        code = tl.load(data + scale_at[:, None] + group[None, :], mask=scaled, other=127)
        code = code.to(tl.int32)
        scale = (code << 23).to(tl.float32, bitcast=True)
        scale = tl.where(code == 255, float("nan"), scale)
        scale = tl.reshape(
            tl.broadcast_to(scale[:, :, None], [N, WIDE // GROUP, GROUP // 2]), [N, WIDE // 2]
        )
        low = _element((both & 7) << 22 | (both & 8) << 28)
        high = _element((both & 0x70) << 18 | (both & 0x80) << 24)
        keys = tl.join((low * scale).to(KIND), (high * scale).to(KIND))
        keys = tl.reshape(keys, [N, WIDE])
    return keys


@triton.jit
def _factor(
    data, page, offset, seen, D: tl.constexpr, PAGE: tl.constexpr, BYTES: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """What scores of the keys at places of pages are multiplied by: [N]."""
    factor = tl.full(page.shape, 1.0, tl.float32)
    if LAYOUT == 8:
        scale = (data + page * BYTES + PAGE * D).to(tl.pointer_type(tl.float32)) + offset
        factor = tl.load(scale, mask=seen, other=0.0)
    return factor


@triton.jit
def _product(keys, query, hit, EXACT: tl.constexpr):
    """keys [N, WIDE] by query [heads, WIDE] added to hit [N, heads]."""
    if EXACT:
        return tl.dot(keys, tl.trans(query), hit, input_precision="ieee")
    return tl.dot(keys, tl.trans(query), hit)


@triton.jit
def _keep(
    hit, weight, factor, tile, count, scores, largest, greatest, line, room,
    H: tl.constexpr, NEAR: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Scores of tile's N entries from hit [N, heads], with LEVELS the largest of every NEAR of
    them, of every NEAR of those; of entries from `count` on, the least number."""
    N: tl.constexpr = hit.shape[0]
    w = tile * N + tl.arange(0, N)
    if hit.shape[1] > H:
        hit = tl.where((tl.arange(0, hit.shape[1]) < H)[None, :], hit, 0.0)
    hit = tl.maximum(hit, 0.0, propagate_nan=tl.PropagateNan.ALL)
    value = ordered(tl.sum(hit * weight[None, :], axis=1) * factor)
    value = tl.where(w < count, value, _LEAST)
    tl.store(scores + line * room * 512 + w, value)
    if LEVELS >= 1:
        best = tl.max(tl.reshape(value, [N // NEAR, NEAR]), axis=1)
        group = tile * (N // NEAR) + tl.arange(0, N // NEAR)
        tl.store(largest + line * room * (512 // NEAR) + group, best)
    if LEVELS >= 2:
        WIDE: tl.constexpr = NEAR * NEAR
        best = tl.max(tl.reshape(best, [N // WIDE, NEAR]), axis=1)
        group = tile * (N // WIDE) + tl.arange(0, N // WIDE)
        tl.store(greatest + line * room * (512 // WIDE) + group, best)


@triton.jit(do_not_specialize=[
    "sequences", "first", "last", "block", "ratio", "top_k", "g_stride", "table_stride", "room",
    "bytes",
])  # fmt: skip
def score_kernel(
    q, g, data, page_table, positions, query_start, scores, largest, greatest, sequences, first,
    last, block, ratio, top_k, scale, g_stride, table_stride, room, bytes,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    LAYOUT: tl.constexpr, GROUP: tl.constexpr, NEAR: tl.constexpr, LEVELS: tl.constexpr,
    EXACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows `first` .. `last` - 1 in blocks of `block`; program (block, part) takes every so-manieth
    tile of N entries, kept while the block's queries pass. `scores` [rows, 512 room], `largest`
    and `greatest` (a NEAR-th, and again) of this call. Rows that see `top_k` entries or fewer take
    them all, so they are not scored."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    row = first + tl.program_id(0) * block
    end = tl.minimum(row + block, last)
    head, lane = tl.arange(0, HB), tl.arange(0, WIDE)
    heads = (head < H)[:, None]
    if WIDE > D:
        heads = heads & (lane < D)[None, :]
    s = row_sequence(query_start, sequences, row)
    while row < end:
        if s >= sequences:  # padding
            row = end
        else:
            stop = tl.minimum(tl.load(query_start + s + 1), end)
            begin = tl.load(positions + row).to(tl.int32)  # then one by one
            most = (begin + stop - row) // ratio
            if (most > top_k) & (stop > row):
                for tile in range(part, tl.cdiv(most, N), parts):
                    w = tile * N + tl.arange(0, N)
                    seen = w < most
                    at = page_table + s.to(tl.int64) * table_stride + w // PAGE
                    page = tl.load(at, mask=seen, other=0).to(tl.int64)
                    keys = _keys(data, page, w % PAGE, seen, 0, WIDE, D, PAGE, bytes, LAYOUT,
                                 GROUP, q.dtype.element_ty)  # fmt: skip
                    if WIDE < D:
                        rest = _keys(data, page, w % PAGE, seen, WIDE, WIDE, D, PAGE, bytes, LAYOUT,
                                     GROUP, q.dtype.element_ty)  # fmt: skip
                    factor = scale * _factor(data, page, w % PAGE, seen, D, PAGE, bytes, LAYOUT)
                    # the first row that sees into this tile and is scored
                    needed = (tl.maximum(tile * N, top_k) + 1) * ratio - 1
                    for t in range(tl.maximum(row, row + needed - begin), stop):
                        here = q + tl.cast(t, tl.int64) * (H * D)
                        here += head[:, None] * D + lane[None, :]
                        query = tl.load(here, mask=heads, other=0.0)
                        weight = tl.load(g + tl.cast(t, tl.int64) * g_stride + head, mask=head < H,
                                         other=0.0).to(tl.float32)  # fmt: skip
                        hit = _product(keys, query, tl.zeros([N, HB], tl.float32), EXACT)
                        if WIDE < D:
                            query = tl.load(here + WIDE, mask=heads, other=0.0)
                            hit = _product(rest, query, hit, EXACT)
                        _keep(
                            hit, weight, factor, tile, (begin + t - row + 1) // ratio, scores,
                            largest, greatest, tl.cast(t - first, tl.int64), room, H, NEAR, LEVELS,
                        )  # fmt: skip
            row = stop
            s += 1


@triton.jit(do_not_specialize=[
    "sequences", "first", "ratio", "top_k", "g_stride", "table_stride", "room", "bytes",
])  # fmt: skip
def score_one_kernel(
    q, g, data, page_table, positions, query_start, scores, largest, greatest, sequences, first,
    ratio, top_k, scale, g_stride, table_stride, room, bytes,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    LAYOUT: tl.constexpr, GROUP: tl.constexpr, NEAR: tl.constexpr, LEVELS: tl.constexpr,
    EXACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As `score_kernel` for one row a program: its query is kept while tiles of keys pass."""
    t = first + tl.program_id(0)
    part, parts = tl.program_id(1), tl.num_programs(1)
    head, lane = tl.arange(0, HB), tl.arange(0, WIDE)
    heads = (head < H)[:, None]
    if WIDE > D:
        heads = heads & (lane < D)[None, :]
    most = ((tl.load(positions + t) + 1) // ratio).to(tl.int32)
    s = row_sequence(query_start, sequences, t)
    if (s < sequences) & (most > top_k):
        here = q + t.to(tl.int64) * (H * D) + head[:, None] * D + lane[None, :]
        query = tl.load(here, mask=heads, other=0.0)
        weight = tl.load(g + t.to(tl.int64) * g_stride + head, mask=head < H, other=0.0)
        weight = weight.to(tl.float32)
        for tile in range(part, tl.cdiv(most, N), parts):
            w = tile * N + tl.arange(0, N)
            seen = w < most
            at = page_table + s.to(tl.int64) * table_stride + w // PAGE
            page = tl.load(at, mask=seen, other=0).to(tl.int64)
            keys = _keys(data, page, w % PAGE, seen, 0, WIDE, D, PAGE, bytes, LAYOUT, GROUP,
                         q.dtype.element_ty)  # fmt: skip
            factor = scale * _factor(data, page, w % PAGE, seen, D, PAGE, bytes, LAYOUT)
            hit = _product(keys, query, tl.zeros([N, HB], tl.float32), EXACT)
            _keep(
                hit, weight, factor, tile, most, scores, largest, greatest,
                tl.program_id(0).to(tl.int64), room, H, NEAR, LEVELS,
            )  # fmt: skip
