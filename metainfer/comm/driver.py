"""The CUDA driver calls that communication needs beside `kernels.driver`."""

from __future__ import annotations

import ctypes
from typing import Any

from metainfer.kernels.driver import (
    EARLY_FROM,
    CudaError,
    Function,
    Module,
    call,
    check,
    library,
    u64,
)

__all__ = ["EARLY_FROM", "CudaError", "Function", "Module", "call", "check", "library", "u64"]

HOST_PORTABLE, HOST_MAPPED = 1, 2
IPC_LAZY_PEER = 1
IPC_HANDLE_BYTES = 64
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""What a process of ranks is started with: as many hardware queues as there can be. Streams that
share one wait for each other, and one that waits for a peer holds up all of them."""
STREAMS_COUNT = 122
"""``CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS``."""


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``; passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


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


_P, _U = ctypes.c_uint64, ctypes.c_uint
IN_STREAMS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("cuEventRecord", (_P, _P)),
    ("cuStreamWaitEvent", (_P, _P, _U)),
    ("cuMemcpyDtoHAsync_v2", (_P, _P, ctypes.c_size_t, _P)),
    ("cuMemcpyHtoDAsync_v2", (_P, _P, ctypes.c_size_t, _P)),
    ("cuMemcpyDtoDAsync_v2", (_P, _P, ctypes.c_size_t, _P)),
    ("cuStreamWriteValue64_v2", (_P, _P, _P, _U)),
    ("cuStreamWaitValue64_v2", (_P, _P, _P, _U)),
    ("cuLaunchKernel", (_P, _U, _U, _U, _U, _U, _U, _U, _P, _P, _P)),
)
"""What collectives put into streams, by name and types of arguments; handles and addresses are
words. The order is that of `enqueue.Kind`."""
EVENT_ONLY_ORDERS = 2
"""``CU_EVENT_DISABLE_TIMING``."""


def in_streams() -> list[Any]:
    """The functions of `IN_STREAMS`; each returns a status."""
    return [ctypes.CFUNCTYPE(ctypes.c_int, *types)((name, library())) for name, types in IN_STREAMS]


def create_event() -> int:
    """An event that orders streams and knows no time."""
    event = ctypes.c_uint64()
    call("cuEventCreate", ctypes.byref(event), EVENT_ONLY_ORDERS)
    return event.value


def destroy_event(event: int) -> None:
    call("cuEventDestroy_v2", u64(event))


def counts(device: int) -> bool:
    """Whether a stream of `device` can write and await counters by itself."""
    handle, found = ctypes.c_int(), ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(handle), device)
    call("cuDeviceGetAttribute", ctypes.byref(found), STREAMS_COUNT, handle)
    return bool(found.value)


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
