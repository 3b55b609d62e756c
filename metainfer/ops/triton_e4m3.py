"""e4m3 in Triton without the type: bytes and float32 by integer arithmetic.

For cards whose compiler has no e4m3 (before 8.9), and for the interpreter, which loses the carry
when it rounds to it. Both directions are exact as `formats.elements` is; what they make fits
bfloat16, so products of such operands in bfloat16 are the products of the e4m3 numbers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_values(code):
    """Bytes as float32; no step of it meets a denormal number, which a card may flush."""
    bits = code.to(tl.int32)
    size = bits & 0x7F
    normal = ((size << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where(bits >= 128, -value, value)


@triton.jit
def e4m3_rounded(x):
    """float32 x, at most 448, as the nearest number that e4m3 holds, ties to even; NaN stays.

    Adding 1.5 times 2^23 steps leaves a multiple of the step, which is 2^-3 of x's binade and 2^-9
    at least.
    """
    bits = x.to(tl.int32, bitcast=True)
    binade = tl.maximum((bits >> 23) & 0xFF, 121)
    shift = (((binade + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (x + shift) - shift


@triton.jit
def e4m3_wide(block):
    """A tile of e4m3 numbers as float32: bytes, the type itself, or wider already."""
    if block.dtype == tl.uint8:
        wide = e4m3_values(block)
    else:
        wide = block.to(tl.float32)
    return wide
