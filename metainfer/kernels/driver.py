"""The CUDA driver through ctypes, in the context of torch: calls, loaded cubins, launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from metainfer.core.errors import UserError

LIBRARY = "libcuda.so.1"
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PLAIN_SHARED = 48 << 10
"""Bytes of shared memory that a launch has without asking."""


class CudaError(UserError):
    """A driver call failed."""

    default_code = "cuda_error"


@cache
def library() -> Any:
    """The driver, initialised.

    Raises:
        CudaError: there is none here, or it has no device.
    """
    try:
        found = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CudaError(f"{LIBRARY} cannot be loaded: no NVIDIA driver here.") from error
    check(found, "cuInit", found.cuInit(0))
    return found


def check(found: Any, name: str, status: int) -> None:
    """Raise `CudaError` unless `status` is success."""
    if status == 0:
        return
    text = ctypes.c_char_p()
    found.cuGetErrorString(status, ctypes.byref(text))
    said = (text.value or b"unknown error").decode()
    raise CudaError(f"{name} failed: {said} ({status}).", "See the driver's log (dmesg).")


def call(name: str, *arguments: Any) -> None:
    """One driver call by name."""
    found = library()
    check(found, name, getattr(found, name)(*arguments))


def u64(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


class Module:
    """A loaded cubin; `function(name)` is ready to launch."""

    def __init__(self, cubin: bytes) -> None:
        self._module = ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(self._module), cubin)
        self._functions: dict[str, Function] = {}

    def function(self, name: str) -> Function:
        if name not in self._functions:
            handle = ctypes.c_void_p()
            call("cuModuleGetFunction", ctypes.byref(handle), self._module, name.encode())
            self._functions[name] = Function(handle)
        return self._functions[name]


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint64 * 8))


class _Launch(ctypes.Structure):
    """``CUlaunchConfig``: grid, block, dynamic shared bytes, stream, attributes."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


EARLY_FROM = (9, 0)
"""Compute capability from which a launch may come early: ``griddepcontrol`` is there."""
_EARLY = _Attribute(6, (1,))  # PROGRAMMATIC_STREAM_SERIALIZATION, allowed


class Function:
    """A kernel. Arguments are ctypes values that stay alive until the launch returns."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle
        self._launch = library().cuLaunchKernel
        self._launch_early = library().cuLaunchKernelEx
        self._shared = PLAIN_SHARED

    @property
    def handle(self) -> int:
        """The driver's own name for it."""
        return self._handle.value or 0

    def __call__(
        self,
        grid: int,
        block: int,
        stream: int,
        arguments: Sequence[Any],
        shared: int = 0,
        early: bool = False,
    ) -> None:
        """`shared`: bytes of dynamic shared memory of a block. `early`: the kernel waits itself for
        those before it in the stream, so it may take its place on the device while the last of them
        still runs, if that one lets it (devices of `EARLY_FROM` on)."""
        if shared > self._shared:
            call("cuFuncSetAttribute", self._handle, MAX_DYNAMIC_SHARED, shared)
            self._shared = shared
        given = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        if early:
            launch = _Launch((grid, 1, 1), (block, 1, 1), shared, stream, ctypes.pointer(_EARLY), 1)
            status = self._launch_early(ctypes.byref(launch), self._handle, given, None)
        else:
            status = self._launch(
                self._handle, grid, 1, 1, block, 1, 1, shared, ctypes.c_void_p(stream), given, None
            )
        if status:
            check(library(), "cuLaunchKernel", status)
