"""The CUDA driver calls that communication needs, through ctypes, in the context of torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from metainfer.core.errors import UserError

LIBRARY = "libcuda.so.1"
HOST_PORTABLE, HOST_MAPPED = 1, 2
IPC_LAZY_PEER = 1
IPC_HANDLE_BYTES = 64


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``; passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


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


class Function:
    """A kernel. Arguments are ctypes values that stay alive until the launch returns."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle
        self._launch = library().cuLaunchKernel

    def __call__(self, grid: int, block: int, stream: int, arguments: Sequence[Any]) -> None:
        given = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        status = self._launch(
            self._handle, grid, 1, 1, block, 1, 1, 0, ctypes.c_void_p(stream), given, None
        )
        if status:
            check(library(), "cuLaunchKernel", status)


def copy_down(target: int, source: int, size: int, stream: int) -> None:
    """Device to host, on a stream."""
    status = library().cuMemcpyDtoHAsync_v2(
        ctypes.c_void_p(target), u64(source), ctypes.c_size_t(size), ctypes.c_void_p(stream)
    )
    check(library(), "cuMemcpyDtoHAsync", status)


def copy_up(target: int, source: int, size: int, stream: int) -> None:
    """Host to device, on a stream."""
    status = library().cuMemcpyHtoDAsync_v2(
        u64(target), ctypes.c_void_p(source), ctypes.c_size_t(size), ctypes.c_void_p(stream)
    )
    check(library(), "cuMemcpyHtoDAsync", status)


def allocate(size: int) -> int:
    """Plain device memory, outside torch's allocator: its segments may not be exported (B-16)."""
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return address.value


def free(address: int) -> None:
    call("cuMemFree_v2", u64(address))


def export_memory(address: int) -> bytes:
    handle = IpcHandle()
    call("cuIpcGetMemHandle", ctypes.byref(handle), u64(address))
    return bytes(ctypes.string_at(ctypes.addressof(handle), IPC_HANDLE_BYTES))


def import_memory(handle: bytes) -> int:
    """A peer's memory in this process. Not for handles of this process's own."""
    given = IpcHandle.from_buffer_copy(handle)
    address = ctypes.c_uint64()
    call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, IPC_LAZY_PEER)
    return address.value


def drop_memory(address: int) -> None:
    call("cuIpcCloseMemHandle", u64(address))


def register_host(address: int, size: int) -> int:
    """Pin host memory of ours and return its address for the device."""
    call(
        "cuMemHostRegister_v2",
        ctypes.c_void_p(address),
        ctypes.c_size_t(size),
        HOST_PORTABLE | HOST_MAPPED,
    )
    device = ctypes.c_uint64()
    call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), ctypes.c_void_p(address), 0)
    return device.value


def unregister_host(address: int) -> None:
    call("cuMemHostUnregister", ctypes.c_void_p(address))
