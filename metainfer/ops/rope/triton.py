"""Rotary embedding in Triton: one program per token and side (queries, keys)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.ops.strides import heads_packed


@triton.jit
def _turn(
    x, out, stride, table, token, position, heads,
    D: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    lane = tl.arange(0, HALF)[None, :]  # [1, HALF]
    mask = (head < heads) & (lane < R // 2)
    first = lane * 2 if PAIRS else lane
    second = first + 1 if PAIRS else lane + R // 2
    row = x + token * stride + head * D
    target = out + (token * heads + head) * D
    cos = tl.load(table + position * R + lane, mask=lane < R // 2, other=0.0)
    sin = tl.load(table + position * R + R // 2 + lane, mask=lane < R // 2, other=0.0)
    a = tl.load(row + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(row + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + first, (a * cos - b * sin).to(out.dtype.element_ty), mask=mask)
    tl.store(target + second, (b * cos + a * sin).to(out.dtype.element_ty), mask=mask)
    if R < D:
        tail = R + tl.arange(0, REST)[None, :]
        passed = (head < heads) & (tail < D)
        tl.store(target + tail, tl.load(row + tail, mask=passed), mask=passed)


@triton.jit
def rope_kernel(
    q, k, q_out, k_out, positions, table, q_stride, k_stride,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    HQ_TILE: tl.constexpr, HKV_TILE: tl.constexpr, HALF: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if tl.program_id(1) == 0:
        _turn(q, q_out, q_stride, table, token, position, HQ, D, R, HQ_TILE, HALF, PAIRS, REST)
    else:
        _turn(k, k_out, k_stride, table, token, position, HKV, D, R, HKV_TILE, HALF, PAIRS, REST)


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """See `ref.rope`; q and k may have any token stride."""
    tokens, hq, d = q.shape
    hkv, rotated = k.shape[1], cos_sin.shape[1]
    if not all(heads_packed(x) for x in (q, k)):
        raise InternalError(f"rope wants packed heads, got strides {q.stride()} and {k.stride()}")
    q_out = torch.empty((tokens, hq, d), dtype=q.dtype, device=q.device)
    k_out = torch.empty((tokens, hkv, d), dtype=k.dtype, device=k.device)
    if tokens:
        power = triton.next_power_of_2
        rope_kernel[(tokens, 2)](
            q, k, q_out, k_out, positions, cos_sin, q.stride(0), k.stride(0),
            hq, hkv, d, rotated, power(hq), power(hkv), power(rotated // 2),
            interleaved, power(max(d - rotated, 1)), num_warps=4,
        )  # fmt: skip
    return q_out, k_out
