"""The data test between GPUs, run as a process of its own: it may hang or die without harm to us.

Its argument is a JSON list of [source, target, kind]; it prints one JSON line before and one after
each test. The source GPU writes to the target's memory, reads from it, or copies to it by the copy
engine; the bytes are then compared on the host. Destinations are filled with a poison first, so
that a transfer that does nothing is not taken for a right one.

Speaks to the driver through ctypes: no torch, a second of start-up. The kernel is PTX text that the
driver compiles for whatever card is there.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

LIBRARY = "libcuda.so.1"
WORDS = 1_048_573  # 4 MiB less an odd rest: no size that a transfer is likely to be right for alone
POISON = 0xDEADBEEF
KINDS = ("write", "read", "copy")
BLOCK = 256

#: dst[k] = src[k] for k < count, one 4-byte word per thread.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry move(.param .u64 to, .param .u64 from, .param .u32 count)
{
    .reg .pred %over;
    .reg .b32 %block, %width, %lane, %index, %limit, %word;
    .reg .b64 %dst, %src, %offset;
    ld.param.u64 %dst, [to];
    ld.param.u64 %src, [from];
    ld.param.u32 %limit, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %lane, %tid.x;
    mad.lo.u32 %index, %block, %width, %lane;
    setp.ge.u32 %over, %index, %limit;
    @%over bra done;
    cvta.to.global.u64 %dst, %dst;
    cvta.to.global.u64 %src, %src;
    mul.wide.u32 %offset, %index, 4;
    add.u64 %dst, %dst, %offset;
    add.u64 %src, %src, %offset;
    ld.global.u32 %word, [%src];
    st.global.u32 [%dst], %word;
done:
    ret;
}
\0"""


class DriverError(Exception):
    """A call of the driver that failed, with its name and number."""


class Driver:
    """The calls in use; each raises `DriverError` unless it returns 0."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._functions: dict[int, ctypes.c_void_p] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise DriverError(f"{name} failed with CUDA error {status}")

    def enter(self, index: int) -> None:
        """Make GPU `index` current, with its kernel loaded."""
        if index not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(device), index)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[index] = context
        self.call("cuCtxSetCurrent", self._contexts[index])
        if index not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), PTX)
            self.call("cuModuleGetFunction", ctypes.byref(function), module, b"move")
            self._functions[index] = function

    def open_peer(self, source: int, target: int) -> None:
        """Let kernels on `source` address the memory of `target`."""
        self.enter(target)
        self.enter(source)
        status = self._library.cuCtxEnablePeerAccess(self._contexts[target], 0)
        if status not in (0, 704):  # 704: it is open already
            raise DriverError(f"cuCtxEnablePeerAccess failed with CUDA error {status}")

    def allocate(self, index: int) -> ctypes.c_uint64:
        self.enter(index)
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(WORDS * 4))
        return address

    def free(self, index: int, address: ctypes.c_uint64) -> None:
        self.enter(index)
        self.call("cuMemFree_v2", address)

    def fill(self, index: int, address: ctypes.c_uint64, data: bytes | None) -> None:
        """`data` from the host, or the poison."""
        self.enter(index)
        if data is None:
            words = ctypes.c_size_t(WORDS)
            self.call("cuMemsetD32_v2", address, ctypes.c_uint(POISON), words)
        else:
            self.call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(len(data)))
        self.call("cuCtxSynchronize")

    def fetch(self, index: int, address: ctypes.c_uint64) -> bytes:
        self.enter(index)
        buffer = ctypes.create_string_buffer(WORDS * 4)
        self.call("cuMemcpyDtoH_v2", buffer, address, ctypes.c_size_t(WORDS * 4))
        return buffer.raw

    def move(self, index: int, to: ctypes.c_uint64, source: ctypes.c_uint64) -> None:
        """The kernel, on GPU `index`."""
        self.enter(index)
        count = ctypes.c_uint(WORDS)
        holders = (to, source, count)
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(holder) for holder in holders))
        blocks = -(-WORDS // BLOCK)
        self.call(
            "cuLaunchKernel", self._functions[index], blocks, 1, 1, BLOCK, 1, 1, 0, None, pointers,
            None,
        )  # fmt: skip
        self.call("cuCtxSynchronize")

    def copy(self, index: int, to: ctypes.c_uint64, source: ctypes.c_uint64) -> None:
        """The copy engine, asked by GPU `index`."""
        self.enter(index)
        self.call("cuMemcpyDtoD_v2", to, source, ctypes.c_size_t(WORDS * 4))
        self.call("cuCtxSynchronize")


def prove(driver: Driver, source: int, target: int, kind: str) -> tuple[str, str]:
    """One test: (``right``, ``wrong`` or ``refused``; detail)."""
    pattern = random.Random(f"{source} {target} {kind}").randbytes(WORDS * 4)
    try:
        driver.open_peer(source, target)
    except DriverError as error:
        return "refused", str(error)
    near, far = driver.allocate(source), driver.allocate(target)
    try:
        sends = kind != "read"
        driver.fill(source, near, pattern if sends else None)
        driver.fill(target, far, None if sends else pattern)
        to, origin = (far, near) if sends else (near, far)
        (driver.copy if kind == "copy" else driver.move)(source, to, origin)
        got = driver.fetch(target, far) if sends else driver.fetch(source, near)
    finally:
        driver.free(source, near)
        driver.free(target, far)
    if got == pattern:
        return "right", f"{len(pattern):,} bytes equal"
    wrong = [k for k in range(0, len(pattern), 4) if got[k : k + 4] != pattern[k : k + 4]]
    return "wrong", f"{len(wrong):,} of {WORDS:,} words differ, the first at byte {wrong[0]:,}"


def run(
    pairs: Iterable[tuple[int, int, str]], driver: Callable[[], Driver]
) -> Iterator[dict[str, object]]:
    """The lines to print: before and after each test."""
    opened = None
    for source, target, kind in pairs:
        head = {"source": source, "target": target, "kind": kind}
        yield {**head, "verdict": "begin"}
        try:
            opened = opened or driver()
            verdict, detail = prove(opened, source, target, kind)
        except (DriverError, OSError) as error:
            verdict, detail = "failed", str(error)
        yield {**head, "verdict": verdict, "detail": detail}


def main(arguments: list[str]) -> None:
    pairs = [(int(i), int(j), str(kind)) for i, j, kind in json.loads(arguments[0])]
    for line in run(pairs, lambda: Driver(ctypes.CDLL(LIBRARY))):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
