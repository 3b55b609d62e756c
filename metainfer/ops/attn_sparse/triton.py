"""Sparse latent attention in Triton: the heads of one query are the rows of the matrix product.

A program takes one query, a block of its heads and a part of its keys: first the window's, then
the chosen (or all visible) compressed entries, gathered through the page tables. One latent is key
and value of every head, so each tile is loaded once and multiplied twice. Online softmax in
float32; weights are rounded to the inputs' type as the recipe does. The sink joins once, at the
end, and the last channels are turned back before the result is written. With several parts a
second kernel adds them in order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.triton_e4m3 import e4m3_values
from metainfer.ops.triton_rows import row_sequence


@triton.jit
def _keys(
    data, at, scale_at, seen, D: tl.constexpr, SCALED: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    """Entries [N, D] that begin at `at`; SCALED: bytes, e4m3 in groups of 64 with scales
    2^(byte - 127) at `scale_at`, then a bf16 tail; 2: for a card without the type e4m3."""
    if SCALED:
        BODY: tl.constexpr = D - TAIL
        # [N, groups, 64]: a scale is widened once for its group
        channel = (tl.arange(0, D // 64) * 64)[None, :, None] + tl.arange(0, 64)[None, None, :]
        # the scales of an entry are eight bytes: one load, of a size that copies ahead
        words = (data + tl.multiple_of(scale_at, 8)).to(tl.pointer_type(tl.int64))
        word = tl.load(words, mask=seen, other=0)[:, None, None]
        code = (word >> (tl.arange(0, D // 64) * 8)[None, :, None]).to(tl.int32) & 0xFF
        at = at[:, None, None]
        seen = seen[:, None, None]
        body = tl.load(data + at + channel, mask=seen & (channel < BODY), other=0)
        tail = (data + at + BODY).to(tl.pointer_type(tl.bfloat16))
        tail = tl.load(tail + (channel - BODY), mask=seen & (channel >= BODY), other=0.0)
        scale = (code << 23).to(tl.float32, bitcast=True)
        if SCALED == 2:
            body = e4m3_values(body) * scale
        else:
            body = body.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
        keys = tl.where(channel < BODY, body, tail.to(tl.float32)).to(tl.bfloat16)
        keys = tl.reshape(keys, [at.shape[0], D])
    else:
        lane = tl.arange(0, D)
        keys = tl.load(data + at[:, None] + lane[None, :], mask=seen[:, None], other=0.0)
    return keys


@triton.jit
def _fold(q, keys, seen, factor, peak, total, mixed, EXACT: tl.constexpr):
    """One tile of keys into the running softmax; every tile holds at least one seen key."""
    if EXACT:
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * factor
    else:
        scores = tl.dot(q, tl.trans(keys)) * factor
    scores = tl.where(seen[None, :], scores, float("-inf"))
    above = tl.maximum(peak, tl.max(scores, axis=1))
    weight = tl.exp2(scores - above[:, None])
    fade = tl.exp2(peak - above)
    total = total * fade + tl.sum(weight, axis=1)
    if EXACT:
        mixed = mixed * fade[:, None] + tl.dot(weight, keys, input_precision="ieee")
    else:
        mixed = tl.dot(weight.to(keys.dtype), keys, mixed * fade[:, None])
    return above, total, mixed


@triton.jit
def _angles(cos_sin, position, D: tl.constexpr, R: tl.constexpr):
    """(cos, sin) [D / 2] of the pairs of channels at `position`; 1 and 0 before the last R / 2."""
    i = tl.arange(0, D // 2) - (D - R) // 2
    row = cos_sin + position * R + i
    cos = tl.load(row, mask=i >= 0, other=1.0)
    return cos, tl.load(row + R // 2, mask=i >= 0, other=0.0)


@triton.jit
def _turned_back(x, cos, sin, H: tl.constexpr, D: tl.constexpr):
    """x [H, D] turned by the angles' negatives, pairs (2i, 2i + 1)."""
    a, b = tl.split(tl.reshape(x, [H, D // 2, 2]))
    cos, sin = cos[None, :], sin[None, :]
    return tl.reshape(tl.join(a * cos + b * sin, b * cos - a * sin), [H, D])


@triton.jit
def _place(page, offset, PAGE: tl.constexpr, ROW: tl.constexpr, BYTES: tl.constexpr,
           SCALES: tl.constexpr):  # fmt: skip
    """(first element of an entry, of its scales) in a cache; BYTES 0: rows without scales."""
    if BYTES:
        at = page * BYTES + offset * ROW
        scale_at = page * BYTES + PAGE * ROW + offset * SCALES
    else:
        at = (page * PAGE + offset) * ROW
        scale_at = at
    return at, scale_at


@triton.jit(do_not_specialize=["sequences", "local_width", "entry_width", "shift", "width"])
def places_kernel(
    local_table, entry_table, selected, positions, query_start, places, scale_places, counts,
    sequences, window, ratio, local_width, entry_width, shift, width,
    LOCAL_PAGE: tl.constexpr, ENTRY_PAGE: tl.constexpr, TOP: tl.constexpr, TOP_LANES: tl.constexpr,
    ENTRIES: tl.constexpr, ROW: tl.constexpr, LOCAL_BYTES: tl.constexpr,
    ENTRY_BYTES: tl.constexpr, SCALES: tl.constexpr, LANES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Where each query's keys begin, relative to the window's cache: [rows, width], the window's
    first; `shift` leads to the entries' cache. TOP: entries listed per query, 0 for all visible."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    t, piece = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + t)
    far = 0
    if TOP:
        top = tl.arange(0, TOP_LANES)
        listed = tl.load(selected + t.to(tl.int64) * TOP + top, mask=top < TOP, other=-1)
        far = tl.sum((listed >= 0).to(tl.int32), axis=0)
    elif ENTRIES:
        far = ((position + 1) // ratio).to(tl.int32)
    s = row_sequence(query_start, sequences, t)
    if s == sequences:
        tl.store(counts + t, 0)
    else:
        low = tl.maximum(position - window + 1, 0)
        near = (position - low + 1).to(tl.int32)
        tl.store(counts + t, near + far)
        j = piece * LANES + tl.arange(0, LANES)
        is_near = j < near
        at = low + j
        table = local_table + s.to(tl.int64) * local_width
        page = tl.load(table + at // LOCAL_PAGE, mask=is_near, other=0).to(tl.int64)
        place, scale_place = _place(page, at % LOCAL_PAGE, LOCAL_PAGE, ROW, LOCAL_BYTES, SCALES)
        if ENTRIES:
            is_far = (j >= near) & (j < near + far)
            entry = j - near
            if TOP:
                entry = tl.load(selected + t.to(tl.int64) * TOP + entry, mask=is_far, other=0)
            table = entry_table + s.to(tl.int64) * entry_width
            page = tl.load(table + entry // ENTRY_PAGE, mask=is_far, other=0).to(tl.int64)
            other, scale_other = _place(
                page, entry % ENTRY_PAGE, ENTRY_PAGE, ROW, ENTRY_BYTES, SCALES
            )
            place = tl.where(is_near, place, other + shift)
            scale_place = tl.where(is_near, scale_place, scale_other + shift)
        where = t.to(tl.int64) * width + j
        tl.store(places + where, place, mask=j < width)
        if LOCAL_BYTES:
            tl.store(scale_places + where, scale_place, mask=j < width)


@triton.jit(do_not_specialize=["width"])
def sparse_kernel(
    q, cache, places, scale_places, counts, sinks, cos_sin, positions, out, parts, peaks, totals,
    factor, q_stride, width,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HB: tl.constexpr, N: tl.constexpr,
    SPLITS: tl.constexpr, EXACT: tl.constexpr, SCALED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """CHAINED: launched while the kernel before still runs, whose results are waited for."""
    t, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head, lane = block * HB + tl.arange(0, HB), tl.arange(0, D)
    heads = (head < H)[:, None]
    where = t.to(tl.int64) * q_stride + head[:, None] * D + lane[None, :]
    tile = tl.load(q + where, mask=heads, other=0.0)  # [HB, D]
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = tl.load(counts + t)
    if count > 0:
        tiles = tl.cdiv(count, N)
        share = tl.cdiv(tiles, SPLITS)
        begin = part * share
        end = tl.minimum(begin + share, tiles)
        peak = tl.full([HB], float("-inf"), tl.float32)
        total = tl.zeros([HB], tl.float32)
        mixed = tl.zeros([HB, D], tl.float32)
        mine = t.to(tl.int64) * width
        for step in range(begin, end):
            j = step * N + tl.arange(0, N)
            seen = j < count
            at = tl.multiple_of(tl.load(places + mine + j, mask=seen, other=0), 8)
            scale_at = at
            if SCALED:
                scale_at = tl.load(scale_places + mine + j, mask=seen, other=0)
            keys = _keys(cache, at, scale_at, seen, D, SCALED, R).to(tile.dtype)
            peak, total, mixed = _fold(tile, keys, seen, factor, peak, total, mixed, EXACT)
        if SPLITS == 1:
            sink = tl.load(sinks + head, mask=head < H, other=0.0) * 1.4426950408889634
            above = tl.maximum(peak, sink)
            fade = tl.exp2(peak - above)
            total = total * fade + tl.exp2(sink - above)
            cos, sin = _angles(cos_sin, tl.load(positions + t), D, R)
            result = _turned_back(mixed * (fade / total)[:, None], cos, sin, HB, D)
            where = (t.to(tl.int64) * H + head[:, None]) * D + lane[None, :]
            tl.store(out + where, result.to(out.dtype.element_ty), mask=heads)
        else:
            place = (t.to(tl.int64) * H + head) * SPLITS + part
            tl.store(peaks + place, peak, mask=head < H)
            if begin < end:
                tl.store(totals + place, total, mask=head < H)
                tl.store(parts + place[:, None] * D + lane[None, :], mixed, mask=heads)


@triton.jit
def merge_kernel(
    parts, peaks, totals, counts, sinks, cos_sin, positions, out,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The parts of one head of one query, the sink, and the turn back."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    # Straight on, so that everything is asked for at once.
    t, head = tl.program_id(0), tl.program_id(1)
    split, lane = tl.arange(0, SPLITS), tl.arange(0, D)
    place = (t.to(tl.int64) * H + head) * SPLITS + split
    position, count = tl.load(positions + t), tl.load(counts + t)
    sink = tl.load(sinks + head) * 1.4426950408889634
    peak, total = tl.load(peaks + place), tl.load(totals + place)
    mixed = tl.load(parts + place[:, None] * D + lane[None, :])
    cos, sin = _angles(cos_sin, position, D, R)
    held = peak > float("-inf")  # a part without keys wrote nothing else
    above = tl.maximum(tl.max(peak, axis=0), sink)
    fade = tl.exp2(peak - above)
    total = tl.sum(tl.where(held, total * fade, 0.0), axis=0) + tl.exp2(sink - above)
    mixed = tl.where(held[:, None], mixed * (fade / total)[:, None], 0.0)
    result = _turned_back(tl.reshape(tl.sum(mixed, axis=0), [1, D]), cos, sin, 1, D)
    where = (t.to(tl.int64) * H + head) * D + lane
    result = tl.reshape(result, [D]).to(out.dtype.element_ty)
    tl.store(out + where, result, mask=lane < tl.where(count > 0, D, 0))
