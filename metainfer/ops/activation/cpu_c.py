"""SwiGLU on CPU in float32 (compiled C), one pass over memory.

Element by element, so nothing depends on the batch. Needs a C compiler; float32.
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

SOURCE = Path(__file__).with_name("cpu_swiglu.c")


def probe() -> Verdict:
    """Whether the C library can be built and loaded here. Never raises."""
    return native.try_load(SOURCE)[1]


@functools.cache
def _function(defines: tuple[str, ...]) -> Callable[..., None]:
    function = native.load(SOURCE, defines=defines).mi_swiglu
    long = ctypes.c_int64
    function.argtypes = [ctypes.c_void_p, long, long, long, ctypes.c_void_p, ctypes.c_int]
    function.restype = None
    return function


def swiglu(gate_up: Tensor, *, threads: int = 0, defines: tuple[str, ...] = ()) -> Tensor:
    """``silu(gate_up[:, :F]) * gate_up[:, F:]``: [T, 2F], any row stride -> [T, F]."""
    if gate_up.dtype != torch.float32 or gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise InternalError(
            f"swiglu in C wants float32 [T, 2F], got {gate_up.dtype} {list(gate_up.shape)}"
        )
    if gate_up.stride(1) != 1:
        raise InternalError("swiglu in C wants contiguous columns")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width))
    _function(defines)(
        gate_up.data_ptr(),
        gate_up.stride(0),
        rows,
        width,
        out.data_ptr(),
        threads or torch.get_num_threads(),
    )
    return out
