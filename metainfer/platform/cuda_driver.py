"""The few questions we ask the CUDA driver itself, through ctypes. Never raises; no context.

NVML knows neither multiprocessor counts nor shared memory per block, and it ignores
``CUDA_VISIBLE_DEVICES``; the driver answers both and in the order that torch uses.
Initialising the driver makes it unusable in children made by a bare fork; ours are executed anew.
Numbers are `CUdevice_attribute` and `CUdevice_P2PAttribute` values of cuda.h.
"""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass
from typing import Protocol

LIBRARY = "libcuda.so.1"

ATTRIBUTES = {
    "warp": 10,
    "units": 16,
    "ecc": 32,
    "memory_clock_khz": 36,
    "bus_width_bits": 37,
    "l2_bytes": 38,
    "capability_major": 75,
    "capability_minor": 76,
    "shared_bytes_per_block": 97,  # opt-in maximum
}
P2P_ACCESS, P2P_ATOMICS = 2, 3


@dataclass(frozen=True, slots=True)
class DriverDevice:
    """What the driver says of one device; a failed question is a missing key or None."""

    name: str | None
    bus_id: str | None
    uuid: str | None
    memory_bytes: int | None
    attributes: dict[str, int]


@dataclass(frozen=True, slots=True)
class DriverView:
    """All visible devices in CUDA order, and `access[(i, j)]` = (peer access, native atomics)."""

    cuda_version: str | None
    devices: tuple[DriverDevice, ...]
    access: dict[tuple[int, int], tuple[bool | None, bool | None]]


class Library(Protocol):
    """The part of `ctypes.CDLL` in use: functions by name, each returning a CUresult."""

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer: ...


def read_driver(library: Library | None = None) -> tuple[DriverView | None, str]:
    """The driver's view, or None with the reason in words."""
    if library is None:
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None, f"{LIBRARY} cannot be loaded: no NVIDIA driver here"
    try:
        return _read(library)
    except (AttributeError, ctypes.ArgumentError, ValueError) as error:
        return None, f"{LIBRARY} does not answer as expected: {error}"


def _read(library: Library) -> tuple[DriverView | None, str]:
    status = library.cuInit(0)
    if status != 0:
        return None, f"cuInit failed with CUDA error {status}"
    count = _int_call(library, "cuDeviceGetCount")
    if not count:
        return None, "the CUDA driver shows no device (CUDA_VISIBLE_DEVICES counts)"
    handles = [_int_call(library, "cuDeviceGet", index) for index in range(count)]
    devices = tuple(_device(library, handle) for handle in handles if handle is not None)
    if len(devices) != count:
        return None, "the CUDA driver lists a device that it does not open"
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    access = {(i, j): _access(library, handles[i], handles[j]) for i, j in pairs}
    number = _int_call(library, "cuDriverGetVersion")
    version = f"{number // 1000}.{number % 1000 // 10}" if number else None
    return DriverView(version, devices, access), ""


def _device(library: Library, handle: int) -> DriverDevice:
    values = {
        name: _int_call(library, "cuDeviceGetAttribute", code, handle)
        for name, code in ATTRIBUTES.items()
    }
    total = ctypes.c_size_t()
    known_total = library.cuDeviceTotalMem_v2(ctypes.byref(total), handle) == 0
    raw = ctypes.create_string_buffer(16)
    known_uuid = library.cuDeviceGetUuid(raw, handle) == 0
    return DriverDevice(
        name=_text_call(library, "cuDeviceGetName", handle),
        bus_id=normal_bus_id(_text_call(library, "cuDeviceGetPCIBusId", handle)),
        uuid=f"GPU-{uuid.UUID(bytes=raw.raw)}" if known_uuid else None,
        memory_bytes=total.value if known_total else None,
        attributes={name: value for name, value in values.items() if value is not None},
    )


def _access(
    library: Library, source: int | None, target: int | None
) -> tuple[bool | None, bool | None]:
    answers = [
        _int_call(library, "cuDeviceGetP2PAttribute", code, source, target)
        for code in (P2P_ACCESS, P2P_ATOMICS)
    ]
    can, atomics = (None if answer is None else bool(answer) for answer in answers)
    return can, atomics


def _int_call(library: Library, name: str, *arguments: int | None) -> int | None:
    value = ctypes.c_int()
    status = getattr(library, name)(ctypes.byref(value), *arguments)
    return value.value if status == 0 else None


def _text_call(library: Library, name: str, handle: int) -> str | None:
    """Name and bus id share the form (buffer, length, device)."""
    buffer = ctypes.create_string_buffer(256)
    if getattr(library, name)(buffer, len(buffer), handle) != 0:
        return None
    return buffer.value.decode("utf-8", "replace") or None


def normal_bus_id(text: str | None) -> str | None:
    """``0000:41:00.0`` in lower case; NVML writes eight domain digits, the driver four."""
    if not text or text.count(":") != 2:
        return None
    domain, rest = text.lower().split(":", 1)
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"
