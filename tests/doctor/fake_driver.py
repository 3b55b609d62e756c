"""libcuda as far as the data test uses it: memories of two GPUs, and faults on demand."""

from __future__ import annotations

import ctypes
from typing import Any

SIZE = 1 << 40  # addresses of GPU n start at (n + 1) * SIZE


class FakeCuda:
    """`faults`: (source, target) -> ``refuse``, ``corrupt``, ``nothing`` or ``error``."""

    def __init__(self, devices: int = 2, faults: dict[tuple[int, int], str] | None = None) -> None:
        self.devices = devices
        self.faults = faults or {}
        self.memory: dict[int, bytearray] = {}
        self.current = -1
        self.opened: set[tuple[int, int]] = set()
        self.next = [(index + 1) * SIZE for index in range(devices)]
        self.freed = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return getattr(self, f"do_{name}", lambda *arguments: 0)

    @staticmethod
    def out(reference: Any, value: int) -> None:
        reference._obj.value = value

    def do_cuDeviceGet(self, device: Any, index: int) -> int:
        self.out(device, index)
        return 0 if index < self.devices else 101

    def do_cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.out(context, device.value + 1)
        return 0

    def do_cuCtxSetCurrent(self, context: Any) -> int:
        self.current = context.value - 1
        return 0

    def do_cuModuleLoadData(self, module: Any, image: bytes) -> int:
        assert b".visible .entry move" in image and image.endswith(b"\0")
        self.out(module, 7)
        return 0

    def do_cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        assert name == b"move"
        self.out(function, 100 + self.current)
        return 0

    def do_cuCtxEnablePeerAccess(self, context: Any, flags: int) -> int:
        pair = (self.current, context.value - 1)
        if self.faults.get(pair) == "refuse":
            return 217
        if pair in self.opened:
            return 704
        self.opened.add(pair)
        return 0

    def do_cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        place = self.next[self.current]
        self.next[self.current] += size.value
        self.memory[place] = bytearray(b"\x11" * size.value)
        self.out(address, place)
        return 0

    def do_cuMemFree_v2(self, address: Any) -> int:
        del self.memory[address.value]
        self.freed += 1
        return 0

    def do_cuMemsetD32_v2(self, address: Any, word: Any, count: Any) -> int:
        self.memory[address.value][:] = word.value.to_bytes(4, "little") * count.value
        return 0

    def do_cuMemcpyHtoD_v2(self, address: Any, data: bytes, size: Any) -> int:
        self.memory[address.value][:] = data[: size.value]
        return 0

    def do_cuMemcpyDtoH_v2(self, buffer: Any, address: Any, size: Any) -> int:
        ctypes.memmove(buffer, bytes(self.memory[address.value]), size.value)
        return 0

    def do_cuMemcpyDtoD_v2(self, to: Any, source: Any, size: Any) -> int:
        return self._move(to.value, source.value, size.value)

    def do_cuLaunchKernel(self, function: Any, *arguments: Any) -> int:
        assert function.value == 100 + self.current
        blocks, _, _, threads, _, _, shared, stream, pointers, extra = arguments
        assert shared == 0 and stream is None and extra is None
        to = ctypes.c_uint64.from_address(pointers[0]).value
        source = ctypes.c_uint64.from_address(pointers[1]).value
        count = ctypes.c_uint.from_address(pointers[2]).value
        assert blocks * threads >= count > (blocks - 1) * threads
        return self._move(to, source, count * 4)

    def _move(self, to: int, source: int, size: int) -> int:
        target = next(g for g in (to // SIZE - 1, source // SIZE - 1) if g != self.current)
        pair = (self.current, target)
        assert pair in self.opened, "peer access was not opened"
        fault = self.faults.get(pair)
        if fault == "error":
            return 700
        if fault == "nothing":
            return 0
        data = bytearray(self.memory[source][:size])
        if fault == "corrupt":
            data[4096] ^= 1
        self.memory[to][:] = data
        return 0
