"""Rotary position embedding on CPU in float32 (compiled C), q and k in one pass.

Needs a C compiler; float32; q and k with packed heads and any stride over T.
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

SOURCE = Path(__file__).with_name("cpu_rope.c")


def probe() -> Verdict:
    """Whether the C library can be built and loaded here. Never raises."""
    return native.try_load(SOURCE)[1]


@functools.cache
def _function(defines: tuple[str, ...]) -> Callable[..., int]:
    function = native.load(SOURCE, defines=defines).mi_rope
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    function.argtypes = [
        *(pointer, long, pointer, long, pointer, pointer, long, long),
        *(long, long, long, long, integer, pointer, pointer, integer),
    ]
    function.restype = integer
    return function


def rope(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hkv, D]
    positions: Tensor,  # int64 [T]
    cos_sin: Tensor,  # float32 [M, R]
    interleaved: bool = False,
    *,
    defines: tuple[str, ...] = (),
) -> tuple[Tensor, Tensor]:
    """New (q, k) with the first R of D channels rotated; see `ref.rope`.

    Raises `InternalError` for a position outside the table.
    """
    width = q.shape[2]
    if not (q.dtype == k.dtype == cos_sin.dtype == torch.float32) or positions.dtype != torch.int64:
        raise InternalError(f"rope in C wants float32 and int64 positions, got {q.dtype}")
    if q.stride()[1:] != (width, 1) or k.stride()[1:] != (width, 1) or k.shape[2] != width:
        raise InternalError("rope in C wants packed heads of one width")
    if not cos_sin.is_contiguous() or not positions.is_contiguous() or cos_sin.shape[1] > width:
        raise InternalError("rope in C wants contiguous tables, no wider than a head")
    out = torch.empty(q.shape), torch.empty(k.shape)
    failed = _function(defines)(
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[0],
        cos_sin.shape[1],
        q.shape[0],
        q.shape[1],
        k.shape[1],
        width,
        interleaved,
        out[0].data_ptr(),
        out[1].data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise InternalError(f"a position outside the rope table of {cos_sin.shape[0]} rows")
    return out
