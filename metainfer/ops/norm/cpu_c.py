"""RMS norm on CPU in float32 (compiled C): one call where torch takes several.

A row's result depends on that row alone. Needs a C compiler; float32; contiguous columns.
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

SOURCE = Path(__file__).with_name("cpu_norm.c")


def probe() -> Verdict:
    """Whether the C library can be built and loaded here. Never raises."""
    return native.try_load(SOURCE)[1]


@functools.cache
def _function(defines: tuple[str, ...]) -> Callable[..., None]:
    function = native.load(SOURCE, defines=defines).mi_rmsnorm
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [
        *(pointer, long, pointer, long, pointer),  # x, stride, residual, stride, weight
        *(ctypes.c_float, long, long, pointer, pointer, ctypes.c_int),
    ]
    function.restype = None
    return function


def _readable(x: Tensor) -> bool:
    """Whether the last dimension is contiguous."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1 or x.numel() == 0


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        raise InternalError(f"rmsnorm in C wants float32, got {x.dtype} and {weight.dtype}")
    if x.dim() != 2 or not _readable(x) or weight.shape != x.shape[1:] or not _readable(weight):
        raise InternalError(f"rmsnorm in C cannot read x {list(x.shape)}, w {list(weight.shape)}")


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    threads: int = 0,
    defines: tuple[str, ...] = (),
) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight``: x [T, D], weight [D] -> [T, D]."""
    _check(x, weight)
    rows, width = x.shape
    out = torch.empty((rows, width))
    _function(defines)(
        x.data_ptr(),
        x.stride(0),
        None,
        0,
        weight.data_ptr(),
        eps,
        rows,
        width,
        out.data_ptr(),
        None,
        threads or torch.get_num_threads(),
    )
    return out


def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    threads: int = 0,
    defines: tuple[str, ...] = (),
) -> tuple[Tensor, Tensor]:
    """``(rmsnorm(s), s)`` of ``s = x + residual``: x, residual [T, D], weight [D]."""
    _check(x, weight)
    if residual.dtype != torch.float32 or residual.shape != x.shape or not _readable(residual):
        raise InternalError(f"add_rmsnorm in C cannot read a residual {list(residual.shape)}")
    rows, width = x.shape
    out, total = torch.empty((rows, width)), torch.empty((rows, width))
    _function(defines)(
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr(),
        residual.stride(0),
        weight.data_ptr(),
        eps,
        rows,
        width,
        out.data_ptr(),
        total.data_ptr(),
        threads or torch.get_num_threads(),
    )
    return out, total
