"""What Triton kernels share that write cache entries: rotation, Hadamard, rounding to a form.

The bytes are those of `kv.store.entry_codecs`. Elements are rounded by integer arithmetic on
float32's bits: the same everywhere, on cards without e4m3 and in the interpreter too.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.core.errors import InternalError
from metainfer.kv.store.entries import EntryPages
from metainfer.kv.store.entry_codecs import value_bytes

FORMS = {"latent@1": 0, "index@1": 0, "latent-fp8@1": 1, "index-fp8@1": 2, "index-fp4@1": 3}
"""Layouts by the number that kernels know them by; 0 keeps channels in the model's type."""

PLAIN, LATENT_FP8, INDEX_FP8, INDEX_FP4 = (tl.constexpr(form) for form in range(4))


def form_constants(pages: EntryPages) -> tuple[int, int, int, int, int, int]:
    """(FORM, GROUP, TAIL, SCALES, PAGE, STRIDE) of `store_entry`."""
    form = pages.form
    if form.layout not in FORMS or not pages.data.is_contiguous():
        raise InternalError(f"kernels write no {form.layout} at strides {pages.data.stride()}")
    number = FORMS[form.layout]
    scales = form.bytes - value_bytes(form) if number else 0
    return number, form.group, form.tail, scales, pages.entries, pages.data.stride(0)


@triton.jit
def sequence_of(query_start, sequences, t):
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
def turned(x, row, H: tl.constexpr, LANES: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """x [H, LANES], of which D channels count, with the last R of them turned by the angle whose
    cosines and sines stand at `row`; pairs (2i, 2i + 1)."""
    a, b = tl.split(tl.reshape(x, [H, LANES // 2, 2]))
    i = tl.arange(0, LANES // 2) - (D - R) // 2
    inside = (i >= 0) & (i < R // 2)
    cos = tl.load(row + i, mask=inside, other=1.0)[None, :]
    sin = tl.load(row + R // 2 + i, mask=inside, other=0.0)[None, :]
    left = tl.where(inside[None, :], a * cos - b * sin, a)
    right = tl.where(inside[None, :], b * cos + a * sin, b)
    return tl.reshape(tl.join(left, right), [H, LANES])


@triton.jit
def mixed_by_hadamard(x, D: tl.constexpr):
    """``x . Had_D * D^-0.5`` of x [D], D a power of two. Each round takes the lowest bit of a
    channel's number and puts it on top, so all are back in place at the end."""
    span: tl.constexpr = D
    rounds: tl.constexpr = span.bit_length() - 1
    for _ in tl.static_range(rounds):
        a, b = tl.split(tl.reshape(x, [D // 2, 2]))
        x = tl.reshape(tl.trans(tl.join(a + b, a - b)), [D])
    return x * (1.0 / D) ** 0.5


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # ordered as numbers are, NaN last


@triton.jit
def _e4m3(x):
    """Bytes of float32 x to nearest even, at most 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the step is 2^-9: adding 2^23 leaves the multiple of it in the lowest bits.
    small = size.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    code = tl.where(size < 0x3C800000, small.to(tl.int32, bitcast=True) - 0x4B000000, normal)
    code = tl.where(size > 0x7F800000, 0x7F, tl.minimum(code, 0x7E))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _e2m1(x):
    """Codes of float32 x to nearest, ties to the even code, at most 6."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32)
    code += (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _bfloat16(x):
    """The upper half of float32 x to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, upper).to(tl.uint16)


@triton.jit
def _powers(size, FLOOR: tl.constexpr, ROUND: tl.constexpr, TOP: tl.constexpr):
    """(scale bytes, 1 / scale) of groups whose largest magnitudes are `size` (bits): the smallest
    power of two that brings them under the form's largest number; 255 for NaN and infinity."""
    finite = size < 0x7F800000
    bits = tl.maximum(tl.where(finite, size, 0), FLOOR)
    byte = ((bits + ROUND) >> 23) - TOP
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    return tl.where(finite, byte, 255).to(tl.uint8), inverse


@triton.jit
def store_entry(
    data, slot, values, LANES: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, TAIL: tl.constexpr, SCALES: tl.constexpr, PAGE: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Round values [LANES] (D channels) to the form and write them at `slot` (int64, 0 or more).
    STRIDE: from page to page."""
    lane = tl.arange(0, LANES)
    page, offset = slot // PAGE, slot % PAGE
    first = data + page * STRIDE
    if FORM == PLAIN:
        at = first + offset * D + lane
        tl.store(at, values.to(data.dtype.element_ty), mask=(lane < D))
    elif FORM == LATENT_FP8:
        BODY: tl.constexpr = D - TAIL
        GROUPS: tl.constexpr = LANES // GROUP
        row = first + offset * (BODY + 2 * TAIL)
        scale_row = first + PAGE * (BODY + 2 * TAIL) + offset * SCALES
        channel = tl.reshape(lane, [GROUPS, GROUP])
        groups = tl.reshape(values, [GROUPS, GROUP])
        inside = channel < BODY
        size = tl.max(tl.where(inside, _magnitude(groups), 0), axis=1)
        byte, inverse = _powers(size, 0x38D1B717, 0x1FFFFF, 8)  # 1e-4; over 1.75 * 2^8
        tl.store(row + channel, _e4m3(groups * inverse[:, None]), mask=inside)
        group = tl.arange(0, GROUPS)
        tl.store(scale_row + group, byte, mask=(group < BODY // GROUP))
        PADDED: tl.constexpr = triton.next_power_of_2(SCALES)
        rest = tl.arange(0, PADDED)
        nothing = tl.zeros([PADDED], tl.uint8)
        tl.store(scale_row + rest, nothing, mask=(rest >= BODY // GROUP) & (rest < SCALES))
        tail = (row + BODY).to(tl.pointer_type(tl.uint16)) + (lane - BODY)
        tl.store(tail, _bfloat16(values), mask=(lane >= BODY) & (lane < D))
    elif FORM == INDEX_FP8:
        size = tl.max(tl.where(lane < D, _magnitude(values), 0), axis=0)
        finite = size < 0x7F800000
        bits = tl.maximum(tl.where(finite, size, 0), 0x38D1B717)
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 448.0)
        codes = _e4m3(tl.div_rn(values, tl.zeros([LANES], tl.float32) + scale))
        tl.store(first + offset * D + lane, codes, mask=(lane < D))
        scale_row = (first + PAGE * D + offset * SCALES).to(tl.pointer_type(tl.float32))
        tl.store(scale_row, tl.where(finite, scale, float("nan")))
    else:
        BLOCKS: tl.constexpr = LANES // GROUP
        groups = tl.reshape(values, [BLOCKS, GROUP])
        byte, inverse = _powers(tl.max(_magnitude(groups), axis=1), 0x01C00000, 0x3FFFFF, 2)
        codes = tl.reshape(_e2m1(groups * inverse[:, None]), [LANES // 2, 2])
        low, high = tl.split(codes)
        pair = tl.arange(0, LANES // 2)
        packed = (low | (high << 4)).to(tl.uint8)
        tl.store(first + offset * (D // 2) + pair, packed, mask=(pair < D // 2))
        group = tl.arange(0, BLOCKS)
        scale_row = first + PAGE * (D // 2) + offset * SCALES
        tl.store(scale_row + group, byte, mask=(group < SCALES))
