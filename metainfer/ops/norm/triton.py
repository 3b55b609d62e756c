"""RMS norm in Triton: a tile of whole rows per program, float32 inside, one rounding."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metainfer.ops.norm.tiles import MAX_WIDTH, rows_per_program, warps_for


@triton.jit(do_not_specialize=["rows"])  # varies by step: one build serves all
def rmsnorm_kernel(
    x, weight, out, rows, stride, eps, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)  # [ROWS, 1]
    col = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    mask = (row < rows) & (col < D)
    h = tl.load(x + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=1, keep_dims=True) / D + eps)
    w = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)
    tl.store(out + row * D + col, (h * scale * w).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])  # varies by step: one build serves all
def add_rmsnorm_kernel(
    x, residual, weight, out, total, rows, stride, residual_stride, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < D)
    a = tl.load(x + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(residual + row * residual_stride + col, mask=mask, other=0.0).to(tl.float32)
    summed = (a + b).to(total.dtype.element_ty)
    tl.store(total + row * D + col, summed, mask=mask)
    h = summed.to(tl.float32)  # the norm sees the rounded sum
    scale = tl.rsqrt(tl.sum(h * h, axis=1, keep_dims=True) / D + eps)
    w = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)
    tl.store(out + row * D + col, (h * scale * w).to(out.dtype.element_ty), mask=mask)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ref.rmsnorm`."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    rows = flat.shape[0]
    if rows == 0:
        return out.view(x.shape)
    block, per = triton.next_power_of_2(width), rows_per_program(width)
    rmsnorm_kernel[(triton.cdiv(rows, per),)](
        flat, weight, out, rows, flat.stride(0), eps, width, block, per,
        num_warps=warps_for(block * per),
    )  # fmt: skip
    return out.view(x.shape)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ref.add_rmsnorm`."""
    rows, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    if rows == 0:
        return out, total
    block, per = triton.next_power_of_2(width), rows_per_program(width)
    add_rmsnorm_kernel[(triton.cdiv(rows, per),)](
        x, residual, weight, out, total, rows, x.stride(0), residual.stride(0), eps,
        width, block, per, num_warps=warps_for(block * per),
    )  # fmt: skip
    return out, total


__all__ = ["MAX_WIDTH", "add_rmsnorm", "add_rmsnorm_kernel", "rmsnorm", "rmsnorm_kernel"]
