"""A CUDA driver and an NVML that answer from tables."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from metainfer.platform.cuda_driver import DriverDevice, DriverView

BUS = ("0000:41:00.0", "0000:81:00.0")
ATTRIBUTES = {
    "warp": 32,
    "units": 156,
    "ecc": 1,
    "memory_clock_khz": 14_000_000,
    "bus_width_bits": 448,
    "l2_bytes": 112 << 20,
    "capability_major": 12,
    "capability_minor": 0,
    "shared_bytes_per_block": 101_376,
}


def view(count: int = 2, access: bool = True, **changes: int) -> DriverView:
    devices = tuple(
        DriverDevice("RTX 6000D", BUS[i], f"GPU-{i}", 84 << 30, {**ATTRIBUTES, **changes})
        for i in range(count)
    )
    pairs = {(i, j): (access, False) for i in range(count) for j in range(count) if i != j}
    return DriverView("13.0", devices, pairs)


class Nvml:
    """Answers by function name; a missing answer raises, as NVML does."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.answers = answers or {}
        self.shut = False

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.shut = True

    def nvmlDeviceGetCount(self) -> int:
        return len(BUS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        # NVML's own order and form: eight domain digits, upper case; here also reversed.
        return SimpleNamespace(busId=f"0000{BUS[1 - handle].upper()}".encode())

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            value = self.answers[name]
            return value(*arguments) if callable(value) else value

        return answer


class DriverLibrary:
    """libcuda with one device; `fail` names functions that return an error."""

    def __init__(self, fail: frozenset[str] = frozenset(), count: int = 1) -> None:
        self.fail, self.count = fail, count

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name in self.fail:
                return 999
            out = getattr(arguments[0], "_obj", arguments[0])
            if name == "cuDeviceGetCount":
                out.value = self.count
            elif name == "cuDeviceGet":
                out.value = 40 + arguments[1]
            elif name == "cuDriverGetVersion":
                out.value = 12090
            elif name == "cuDeviceGetAttribute":
                out.value = arguments[1] * 10
            elif name == "cuDeviceTotalMem_v2":
                assert isinstance(out, ctypes.c_size_t)
                out.value = 96 << 30
            elif name == "cuDeviceGetName":
                out.value = b"A Card"
            elif name == "cuDeviceGetPCIBusId":
                out.value = b"0000:C1:00.0"
            elif name == "cuDeviceGetUuid":
                out.raw = bytes(range(16))
            elif name == "cuDeviceGetP2PAttribute":
                out.value = int(arguments[1] == 2)
            return 0

        return call
