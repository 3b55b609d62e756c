"""SwiGLU in Triton, with and without clamp: one pass, float32 inside, one rounding."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def swiglu_kernel(gate_up, out, stride, limit, F, BLOCK: tl.constexpr, CLAMP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < F
    gate = tl.load(gate_up + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + F + col, mask=mask, other=0.0).to(tl.float32)
    if CLAMP:  # NaN stays NaN
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * F + col, value.to(out.dtype.element_ty), mask=mask)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `ref.swiglu`."""
    return swiglu_clamp(gate_up, 0.0)


def swiglu_clamp(gate_up: Tensor, limit: float) -> Tensor:
    """See `ref.swiglu_clamp`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows and width:
        grid = (rows, triton.cdiv(width, BLOCK))
        swiglu_kernel[grid](
            gate_up, out, gate_up.stride(0), float(limit), width, BLOCK, limit != 0, num_warps=4
        )
    return out
