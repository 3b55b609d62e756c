"""The lightning indexer in Triton: queries turned and rounded, scores, an exact choice.

Scores are whole numbers here: a float32's bits, put in the order of the floats they stand for (NaN
first, one zero), so that comparing is exact and ties are equal. `score_kernel` writes them with the
largest of every `GROUP` neighbours. The top k of a row lie in the k groups whose largest come
first (equal ones by place): each group before another one holds an entry that comes before all of
the other's. So `select_kernel`, one program a row, chooses groups, then entries of those, each by a
search for the k-th highest number; equal entries go to the lower place. Nothing depends on the
number of programs, and no length is asked from the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(-(1 << 31))  # below every score


@triton.jit
def _nearest(x):
    """Whole numbers next to 0 <= x < 2^22, halves to the even one."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _binade(x):
    """2^floor(log2 x) of normal x > 0."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _stored(x, LAYOUT: tl.constexpr, GROUP: tl.constexpr):
    """x [N, D] as its form stores and reads it: 4: e2m1 in groups, 2^e; 8: e4m3, amax / 448."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, [N, D // GROUP, GROUP])
    bits = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)  # NaN last
    finite = bits < 0x7F800000
    if LAYOUT == 4:
        # the smallest e with amax <= 6 * 2^e; 6 is 1.5 * 4. At least 2^-126.
        exponent = ((bits + 0x3FFFFF) >> 23) - 2
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        size = tl.minimum(tl.abs(blocks * inverse[:, :, None]), 6.0)
        step = _binade(tl.maximum(size, 1.0)) * 0.5
    else:
        amax = tl.maximum(bits.to(tl.float32, bitcast=True), 1e-4)
        amax = tl.where(finite, amax, 1.0)
        scale = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
        size = tl.abs(tl.div_rn(blocks, tl.broadcast_to(scale[:, :, None], blocks.shape)))
        size = tl.where(finite[:, :, None], size, 1.0)
        step = _binade(tl.maximum(size, 0.015625)) * 0.125
    inverse_step = ((254 << 23) - step.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    grid = _nearest(size * inverse_step) * step * tl.where(finite, scale, float("nan"))[:, :, None]
    return tl.reshape(tl.where(blocks < 0, -grid, grid), [N, D])


@triton.jit(do_not_specialize=["rows"])
def query_kernel(
    q, positions, cos_sin, out, rows,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, N: tl.constexpr, LAYOUT: tl.constexpr,
    GROUP: tl.constexpr, MIXED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """N of the `rows` vectors [D] of q [T, H, D]: the last R channels turned by pairs, mixed by the
    Hadamard matrix, rounded as keys are."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    live = row < rows
    lane = tl.arange(0, D)
    where = row.to(tl.int64)[:, None] * D + lane[None, :]
    x = tl.load(q + where, mask=live[:, None], other=0.0).to(tl.float32)
    pair = tl.load(q + (where ^ 1), mask=live[:, None], other=0.0).to(tl.float32)
    position = tl.load(positions + row // H, mask=live, other=0)
    i = (lane - (D - R)) // 2
    turned = live[:, None] & (lane >= D - R)[None, :]
    angle = cos_sin + position[:, None] * R + i[None, :]
    cos = tl.load(angle, mask=turned, other=1.0)
    sin = tl.load(angle + R // 2, mask=turned, other=0.0)
    x = x * cos + pair * tl.where((lane % 2 == 0)[None, :], -sin, sin)
    if MIXED:
        other = tl.arange(0, D)
        common = lane[:, None] & other[None, :]
        common ^= common >> 4
        common ^= common >> 2
        common ^= common >> 1
        signs = tl.where(common & 1 == 0, 1.0, -1.0)
        if EXACT:
            mixed = tl.dot(x, signs, input_precision="ieee")
        else:  # a rounded part and what it left out: as good as float32
            kind = q.dtype.element_ty
            part = x.to(kind)
            mixed = tl.dot(part, signs.to(kind))
            mixed = tl.dot((x - part.to(tl.float32)).to(kind), signs.to(kind), mixed)
        x = mixed * (D**-0.5)
    if LAYOUT:
        x = _stored(x, LAYOUT, GROUP)
    tl.store(out + where, x.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _sequence(query_start, sequences, t):
    """The sequence that row t belongs to; `sequences` for a row of padding."""
    left, right = 0, sequences
    while left < right:
        middle = (left + right) // 2
        if tl.load(query_start + middle + 1) <= t:
            left = middle + 1
        else:
            right = middle
    return left


@triton.jit
def _element(nibble):
    """e2m1 as float32."""
    size, sign = nibble & 7, nibble & 8
    grown = ((size >> 1) + 126) << 23 | (size & 1) << 22
    small = tl.where(size == 1, 0x3F000000, 0)
    bits = tl.where(size >= 2, grown, small) | sign << 28
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _keys(
    data, page, offset, seen, D: tl.constexpr, PAGE: tl.constexpr, BYTES: tl.constexpr,
    LAYOUT: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """(keys [N, D], what their scores are multiplied by [N]) at places of pages. A page of a scaled
    form holds the values of all its entries, then their scales."""
    N: tl.constexpr = page.shape[0]
    factor = tl.full([N], 1.0, tl.float32)
    if LAYOUT == 0:
        at = (page * PAGE + offset) * D
        lane = tl.arange(0, D)
        keys = tl.load(data + at[:, None] + lane[None, :], mask=seen[:, None], other=0.0)
    elif LAYOUT == 8:
        at = page * BYTES + offset * D
        lane = tl.arange(0, D)
        code = tl.load(data + at[:, None] + lane[None, :], mask=seen[:, None], other=0)
        code = code.to(tl.int32)
        bits = (code & 0x7F) << 20 | (code & 0x80) << 24
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        keys = tl.where(code & 0x7F == 0x7F, float("nan"), value).to(KIND)
        scale = (data + page * BYTES + PAGE * D).to(tl.pointer_type(tl.float32)) + offset
        factor = tl.load(scale, mask=seen, other=0.0)
    else:
        HALF: tl.constexpr = D // 2
        at = page * BYTES + offset * HALF
        lane = tl.arange(0, HALF)
        both = tl.load(data + at[:, None] + lane[None, :], mask=seen[:, None], other=0)
        both = both.to(tl.int32)
        scale_at = page * BYTES + PAGE * HALF + offset * (D // GROUP)
        code = tl.load(
            data + scale_at[:, None] + tl.arange(0, D // GROUP)[None, :],
            mask=seen[:, None], other=127,
        ).to(tl.int32)  # fmt: skip
        scale = (code << 23).to(tl.float32, bitcast=True)
        scale = tl.where(code == 255, float("nan"), scale)
        scale = tl.reshape(
            tl.broadcast_to(scale[:, :, None], [N, D // GROUP, GROUP // 2]), [N, HALF]
        )
        keys = tl.join(_element(both & 15) * scale, _element(both >> 4) * scale)
        keys = tl.reshape(keys, [N, D]).to(KIND)
    return keys, factor


@triton.jit
def _ordered(x):
    """float32 as whole numbers in its order: NaN above infinity, one zero."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, bits, 0x7FFFFFFF)


@triton.jit(do_not_specialize=[
    "sequences", "first", "last", "block", "ratio", "top_k", "g_stride", "table_stride", "capacity",
    "bytes",
])  # fmt: skip
def score_kernel(
    q, g, data, page_table, positions, query_start, scores, largest, sequences, first, last, block,
    ratio, top_k, scale, g_stride, table_stride, capacity, bytes,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    LAYOUT: tl.constexpr, GROUP: tl.constexpr, NEAR: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Rows `first` .. `last` - 1 in blocks of `block`; program (block, part) takes every so-manieth
    tile of N entries. `scores` [rows, capacity], `largest` [rows, capacity / NEAR] of this call.
    Rows that see `top_k` entries or fewer take them all, so they are not scored."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    row = first + tl.program_id(0) * block
    end = tl.minimum(row + block, last)
    head, lane = tl.arange(0, HB), tl.arange(0, D)
    heads = (head < H)[:, None]
    s = _sequence(query_start, sequences, row)
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
                    keys, factor = _keys(
                        data, page, w % PAGE, seen, D, PAGE, bytes, LAYOUT, GROUP,
                        q.dtype.element_ty,
                    )  # fmt: skip
                    factor = factor * scale
                    # the first row that sees into this tile and is scored
                    needed = (tl.maximum(tile * N, top_k) + 1) * ratio - 1
                    for t in range(tl.maximum(row, row + needed - begin), stop):
                        here = (
                            q + tl.cast(t, tl.int64) * (H * D) + head[:, None] * D + lane[None, :]
                        )
                        query = tl.load(here, mask=heads, other=0.0)
                        weight = tl.load(g + tl.cast(t, tl.int64) * g_stride + head, mask=head < H,
                                         other=0.0).to(tl.float32)  # fmt: skip
                        if EXACT:
                            hit = tl.dot(keys, tl.trans(query), input_precision="ieee")
                        else:
                            hit = tl.dot(keys, tl.trans(query))
                        hit = tl.where((hit <= 0.0) | (head >= H)[None, :], 0.0, hit)  # NaN stays
                        value = _ordered(tl.sum(hit * weight[None, :], axis=1) * factor)
                        mine = w < (begin + t - row + 1) // ratio
                        value = tl.where(mine, value, _LEAST)
                        line = tl.cast(t - first, tl.int64) * capacity
                        tl.store(scores + line + w, value, mask=mine)
                        best = tl.max(tl.reshape(value, [N // NEAR, NEAR]), axis=1)
                        group = tile * (N // NEAR) + tl.arange(0, N // NEAR)
                        line = tl.cast(t - first, tl.int64) * (capacity // NEAR)
                        tl.store(largest + line + group, best, mask=best > _LEAST)
            row = stop
            s += 1


@triton.jit
def _values(source, groups, listed, first, count, LANES: tl.constexpr, NEAR: tl.constexpr):
    """(numbers, their places) at `first` .. of a line of `count`; `listed` >= 0: of the neighbours
    in so many groups, one after the other."""
    i = first + tl.arange(0, LANES)
    inside = i < tl.where(listed >= 0, listed * NEAR, count)
    group = tl.load(groups + i // NEAR, mask=i < listed * NEAR, other=0)
    place = tl.where(listed >= 0, group * NEAR + i % NEAR, i)
    inside = inside & (place < count)
    return tl.load(source + place, mask=inside, other=_LEAST), place


@triton.jit
def _kth(source, groups, listed, count, k, LANES: tl.constexpr, NEAR: tl.constexpr):
    """(number, how many equal to it are taken): with all above it, exactly k. At least k exist."""
    total = tl.where(listed >= 0, listed * NEAR, count)
    top = tl.full([LANES], _LEAST, tl.int32)
    bottom = tl.full([LANES], 0x7FFFFFFF, tl.int32)
    for first in range(0, total, LANES):
        value, _ = _values(source, groups, listed, first, count, LANES, NEAR)
        top = tl.maximum(top, value)
        bottom = tl.minimum(bottom, tl.where(value == _LEAST, 0x7FFFFFFF, value))
    high = tl.max(top, axis=0).to(tl.int64)
    low = tl.min(bottom, axis=0).to(tl.int64)
    above = tl.full([], 0, tl.int32)  # as many are higher than `high`
    while low < high:
        middle = low + (high - low + 1) // 2
        found = tl.zeros([LANES], tl.int32)
        for first in range(0, total, LANES):
            value, _ = _values(source, groups, listed, first, count, LANES, NEAR)
            found += (value >= middle.to(tl.int32)).to(tl.int32)
        reached = tl.sum(found, axis=0)
        if reached == k:  # these, and nothing that equals the number below
            low, high, above = middle - 1, middle - 1, reached
        elif reached > k:
            low = middle
        else:
            high, above = middle - 1, reached
    return low.to(tl.int32), k - above


@triton.jit
def _take(
    source, groups, listed, count, k, out, LANES: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """The places of the k highest, rising: out [k]."""
    border, equals = _kth(source, groups, listed, count, k, LANES, NEAR)
    total = tl.where(listed >= 0, listed * NEAR, count)
    taken = tl.full([], 0, tl.int32)
    passed = tl.full([], 0, tl.int32)
    for first in range(0, total, LANES):
        value, place = _values(source, groups, listed, first, count, LANES, NEAR)
        equal = (value == border).to(tl.int32)
        nth = passed + tl.cumsum(equal, axis=0)
        chosen = (value > border) | ((equal == 1) & (nth <= equals))
        at = taken + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(out + at, place, mask=chosen)
        passed += tl.sum(equal, axis=0)
        taken += tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["sequences", "first", "ratio", "top_k", "capacity"])
def select_kernel(
    scores, largest, groups, positions, query_start, out, sequences, first, ratio, top_k, capacity,
    NEAR: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Row `first` + program: its `top_k` entries, rising, then -1; `groups` [rows, top_k]."""
    line = tl.program_id(0).to(tl.int64)
    t = first + tl.program_id(0)
    mine = out + t.to(tl.int64) * top_k
    seen = tl.full([], 0, tl.int32)
    if t < tl.load(query_start + sequences):
        seen = ((tl.load(positions + t) + 1) // ratio).to(tl.int32)
    if seen <= top_k:
        for begin in range(0, top_k, LANES):
            i = begin + tl.arange(0, LANES)
            tl.store(mine + i, tl.where(i < seen, i, -1), mask=i < top_k)
    else:
        count = tl.cdiv(seen, NEAR)
        listed = tl.full([], -1, tl.int32)
        kept = groups + line * top_k
        if count > top_k:
            _take(largest + line * (capacity // NEAR), kept, listed, count, top_k, kept, LANES,
                  NEAR)  # fmt: skip
            tl.debug_barrier()
            listed = top_k
        _take(scores + line * capacity, kept, listed, seen, top_k, mine, LANES, NEAR)
