"""Cache write on CPU in float32 (compiled C): keys and values of new tokens in one call.

Needs a C compiler; float32 cache; heads packed within a token.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.core.verdict import Verdict
from metainfer.kernels import native

SOURCE = Path(__file__).with_name("cpu_kv_write.c")


def probe() -> Verdict:
    """Whether the C library can be built and loaded here. Never raises."""
    return native.try_load(SOURCE)[1]


@functools.cache
def _function(defines: tuple[str, ...]) -> Callable[..., int]:
    function = native.load(SOURCE, defines=defines).mi_kv_write
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [
        *(pointer, long, pointer, long, pointer, pointer),
        *(long, long, long, long, pointer, long, long),
    ]
    function.restype = ctypes.c_int
    return function


def kv_write(
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,  # [T, Hkv, D]
    k_cache: Tensor,  # [P, G, Hkv, D]
    v_cache: Tensor,  # [P, G, Hkv, D]
    slots: Tensor,  # int64 [T]
    *,
    defines: tuple[str, ...] = (),
) -> None:
    """``cache[slots[t] // G, slots[t] % G] = k[t]`` (and v), in place; slot -1 skips the token.

    Raises `InternalError`, with nothing written, for a slot outside the cache.
    """
    tensors = (k, v, k_cache, v_cache)
    packed = (k.shape[2], 1)
    if any(tensor.dtype != torch.float32 for tensor in tensors) or slots.dtype != torch.int64:
        raise InternalError("kv_write in C wants float32 and int64 slots")
    if any(tensor.stride()[-2:] != packed for tensor in tensors) or not slots.is_contiguous():
        raise InternalError("kv_write in C wants heads packed within a token")
    if k.shape != v.shape or k_cache.shape != v_cache.shape or k_cache.shape[2:] != k.shape[1:]:
        raise InternalError(f"keys {list(k.shape)} do not fit the cache {list(k_cache.shape)}")
    if k_cache.stride() != v_cache.stride():
        raise InternalError("kv_write in C wants both caches laid out alike")
    failed = _function(defines)(
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.shape[0],
        k_cache.shape[1],
        slots.data_ptr(),
        k.shape[0],
        k.shape[1] * k.shape[2],
    )
    if failed:
        raise InternalError("a slot outside the cache")
