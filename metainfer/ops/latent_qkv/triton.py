"""Queries and latents in Triton, one launch: a program takes some heads of a token, or its latent.

Norm, rotation and rounding to the cache's form happen in registers, in float32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.kv.store.entries import EntryPages
from metainfer.ops.latent_qkv.tiles import WARPS, heads_per_program
from metainfer.ops.strides import heads_packed
from metainfer.ops.triton_entries import form_constants, store_entry, turned


@triton.jit
def latent_kernel(
    q, kv, weight, positions, cos_sin, data, slots, out, q_stride, kv_stride, eps,
    H: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr, HB: tl.constexpr,
    NORM_Q: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr,
    SCALES: tl.constexpr, PAGE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    t, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, LANES)[None, :]
    row = cos_sin + tl.load(positions + t) * R
    if block * HB < H:
        head = block * HB + tl.arange(0, HB)[:, None]
        mask = (head < H) & (lane < D)
        x = tl.load(q + t * q_stride + head * D + lane, mask=mask, other=0.0).to(tl.float32)
        if NORM_Q:
            x *= tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
        x = turned(x, row, HB, LANES, D, R)
        tl.store(out + (t * H + head) * D + lane, x.to(out.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + t)
        if slot >= 0:
            held = lane < D
            x = tl.load(kv + t * kv_stride + lane, mask=held, other=0.0).to(tl.float32)
            x *= tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)  # [1, LANES]
            x *= tl.load(weight + lane, mask=held, other=0.0)
            x = tl.reshape(turned(x, row, 1, LANES, D, R), [LANES])
            store_entry(data, slot, x, LANES, D, FORM, GROUP, TAIL, SCALES, PAGE, STRIDE)


def latent_qkv(
    q: Tensor,
    kv: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    pages: EntryPages,
    slots: Tensor,
    *,
    eps: float,
    norm_q: bool,
) -> Tensor:
    """See `ref.latent_qkv`; q and kv may have any token stride, d is even."""
    if not heads_packed(q) or kv.stride(1) != 1:
        raise InternalError(
            f"latents want packed heads and rows, got strides {q.stride()} and {kv.stride()}"
        )
    rows, heads, d = q.shape
    out = torch.empty((rows, heads, d), dtype=q.dtype, device=q.device)
    if rows:
        per = heads_per_program(d, heads)
        latent_kernel[(rows, triton.cdiv(heads, per) + 1)](
            q, kv, kv_weight, positions, cos_sin, pages.data, slots, out, q.stride(0),
            kv.stride(0), eps, heads, d, triton.next_power_of_2(d), cos_sin.shape[1], per, norm_q,
            *form_constants(pages), num_warps=WARPS,
        )  # fmt: skip
    return out
