"""The sum of a token's experts, in the order of its choices, and what the shared expert gives."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine_kernel(
    y, ids, shared, out, D: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """``out[t] = sum over j of y[t TOP + j]`` in order, pairs without an expert left out; rounded,
    then ``+ shared[t]``."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP):
        pair = token * TOP + j
        width = tl.where(tl.load(ids + pair) >= 0, D, 0)
        total += tl.load(y + pair * D + d, mask=d < width, other=0.0).to(tl.float32)
    at = token * D + d
    if SHARED:
        beside = tl.load(shared + at, mask=d < D, other=0.0).to(tl.float32)
        total = total.to(out.dtype.element_ty).to(tl.float32) + beside
    tl.store(out + at, total.to(out.dtype.element_ty), mask=d < D)
