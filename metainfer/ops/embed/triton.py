"""Token embedding in Triton: copy rows of the dense table."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metainfer.ops.linear.packed import PackedWeight

BLOCK = 1024


@triton.jit
def embed_kernel(ids, table, out, D, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token)
    value = tl.load(table + row * D + col, mask=col < D)
    tl.store(out + token * D + col, value, mask=col < D)


def embed(ids: Tensor, table: PackedWeight) -> Tensor:
    """See `ref.embed`; an id outside the table is not detected."""
    weight = table.data["weight"]  # [V, Dm]
    tokens, width = ids.shape[0], weight.shape[1]
    out = torch.empty((tokens, width), dtype=weight.dtype, device=weight.device)
    if tokens:
        grid = (tokens, triton.cdiv(width, BLOCK))
        embed_kernel[grid](ids, weight, out, width, BLOCK, num_warps=4)
    return out
