"""Cache write in Triton: one program per token copies its keys and values."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.ops.strides import heads_packed


@triton.jit
def kv_write_kernel(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, page_stride, token_stride,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        col = tl.arange(0, BLOCK)
        target = (slot // PAGE) * page_stride + (slot % PAGE) * token_stride + col
        mask = col < WIDTH
        tl.store(k_cache + target, tl.load(k + token * k_stride + col, mask=mask), mask=mask)
        tl.store(v_cache + target, tl.load(v + token * v_stride + col, mask=mask), mask=mask)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `ref.kv_write`; k and v may have any token stride, both caches are laid out alike."""
    tokens, hkv, d = k.shape
    if not all(heads_packed(x) for x in (k, v)) or k_cache.stride() != v_cache.stride():
        raise InternalError(
            f"kv_write wants packed heads and caches laid out alike, got strides {k.stride()}, "
            f"{v.stride()}, {k_cache.stride()}, {v_cache.stride()}"
        )
    if tokens:
        width = hkv * d
        kv_write_kernel[(tokens,)](
            k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0),
            k_cache.stride(0), k_cache.stride(1), k_cache.shape[1], width,
            triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
