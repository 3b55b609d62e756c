"""Index queries in Triton, in one launch: turned, mixed by the Hadamard matrix, rounded as keys."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mixed(x):
    """x [N, D] times the Hadamard matrix: a sum and a difference of pairs for each bit of a
    channel, in float32. Pairs of one thread cost no exchange, others one between lanes."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    second = tl.arange(0, 2)[None, None, :, None] == 1
    for bit in tl.static_range(8):
        if 1 << bit < D:
            pairs = tl.reshape(x, [N, D >> (bit + 1), 2, 1 << bit])
            total = tl.sum(pairs, axis=2, keep_dims=True)
            x = tl.reshape(tl.where(second, total - 2.0 * pairs, total), [N, D])
    return x


@triton.jit
def _stored(x, LAYOUT: tl.constexpr, GROUP: tl.constexpr):
    """x [N, D] as its form stores and reads it: 4: e2m1 in groups, 2^e; 8: e4m3, amax / 448."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [N, D // GROUP, GROUP])
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2, keep_dims=True)  # NaN last
    finite = bits < 0x7F800000
    if LAYOUT == 4:
        # the smallest e with amax <= 6 * 2^e; 6 is 1.5 * 4. At least 2^-126.
        exponent = ((bits + 0x3FFFFF) >> 23) - 2
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        x = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        amax = tl.maximum(bits.to(tl.float32, bitcast=True), 1e-4)
        scale = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        # division with one reciprocal a group: what the product left out is added
        near = x * inverse
        x = tl.fma(tl.fma(-near, scale + tl.zeros_like(x), x), inverse + tl.zeros_like(x), near)
    least: tl.constexpr = 1.0 if LAYOUT == 4 else 0.015625  # with a leading one
    digits: tl.constexpr = 1 if LAYOUT == 4 else 3
    # 1.5 * 2^23 steps of x's binade: added and taken away, it leaves the nearest, halves to even
    binade = tl.maximum(tl.abs(x), least).to(tl.int32, bitcast=True) & 0x7F800000
    steps = (binade + (((23 - digits) << 23) + 0x400000)).to(tl.float32, bitcast=True)
    grid = ((x + steps) - steps) * tl.where(finite, scale, float("nan"))
    return tl.reshape(grid, [N, D])


@triton.jit
def query_kernel(
    q, positions, cos_sin, out,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, N: tl.constexpr, LAYOUT: tl.constexpr,
    GROUP: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """N heads of one token of q [T, H, D]: program T's blocks one after the other. The last R
    channels are turned by pairs."""
    BLOCKS: tl.constexpr = (H + N - 1) // N
    t = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * N + tl.arange(0, N)
    where = t * (H * D) + head[:, None] * D + tl.arange(0, D)[None, :]
    live = (head < H)[:, None]
    x = tl.load(q + where, mask=live, other=0.0).to(tl.float32)
    pair = tl.arange(0, D // 2) - (D - R) // 2
    angle = cos_sin + tl.load(positions + t) * R + pair
    cos = tl.load(angle, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(angle + R // 2, mask=pair >= 0, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(x, [N, D // 2, 2]))
    x = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [N, D])
    if MIXED:
        x = _mixed(x) * (D**-0.5)
    if LAYOUT:
        x = _stored(x, LAYOUT, GROUP)
    tl.store(out + where, x.to(out.dtype.element_ty), mask=live)
