"""What products with block scales share in Triton: a block's scale, and sums cut into parts."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_scale(scales, at, E8M0: tl.constexpr):
    """One scale as float32; E8M0: the byte e of 2^(e - 127)."""
    raw = tl.load(scales + at)
    if E8M0:
        raw = (raw.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return raw


@triton.jit
def power(bits):
    """2^ceil(log2(amax / 448)) from the bits of amax, floored at 1e-4; NaN stays visible."""
    bits = tl.maximum(bits, 0x38D1B717)  # 1e-4
    exponent = ((bits + 0x1FFFFF) >> 23) - 8
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, scale, float("nan")), inverse


@triton.jit
def come_early(lines):
    """In a kernel launched before the one in front ended: ask for the cache lines that `lines`
    points to (no kernel writes them), let the next kernel come, and wait for what the one in front
    writes."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@triton.jit
def finish(acc, out, parts, counter, part, size, where, mask, SPLITS: tl.constexpr):
    """Store `acc` at ``out + where``, or leave it as one of SPLITS parts of `size` numbers each:
    the last to arrive adds them in order, so that the sum is the same every time."""
    if SPLITS == 1:
        tl.store(out + where, acc.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(parts + part * size + where, acc, mask=mask)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            total = tl.load(parts + where, mask=mask, other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(
                    parts + other * size + where, mask=mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(out + where, total.to(out.dtype.element_ty), mask=mask)
            tl.store(counter, 0)
