"""The driver's functions that collectives put into streams, on the threads of `fake_cuda`.

They are ctypes callbacks, so that C calls them as it calls the driver. `failing` makes one of them
fail; `asked` has every call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import fake_cuda

from metainfer.comm import driver
from metainfer.comm.layout import Call

WORDS = {"mi_post": 2, "mi_await": 6}
"""Arguments of kernels that take words alone."""


class Driver:
    """`noted`: called with name and stream before a copy is put into it."""

    def __init__(self) -> None:
        self.events: list[fake_cuda.Event] = []
        self.asked: list[tuple[Any, ...]] = []
        self.failing: tuple[int, int] | None = None  # which call from now on, and its status
        self.noted: Callable[[str, int], None] = lambda name, stream: None
        self._functions = [
            ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._asked(name))
            for name, types in driver.IN_STREAMS
        ]

    def in_streams(self) -> list[Any]:
        return list(self._functions)

    def create_event(self) -> int:
        self.events.append(fake_cuda.Event())
        return len(self.events)

    def destroy_event(self, event: int) -> None:
        assert self.events[event - 1] is not None

    def _asked(self, name: str) -> Callable[..., int]:
        step = getattr(self, f"_{name.removesuffix('_v2')}")

        def asked(*given: int) -> int:
            self.asked.append((name, *given))
            if self.failing is not None:
                left, status = self.failing
                self.failing = (left - 1, status)
                if left == 0:
                    return status
            try:
                step(*given)
            except Exception as error:  # noqa: BLE001 - C cannot raise it
                print(f"{name}{given}: {error!r}")
                return 999
            return 0

        return asked

    def _cuEventRecord(self, event: int, stream: int) -> None:
        self.events[event - 1].record(fake_cuda.Stream.known[stream])

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        fake_cuda.Stream.known[stream].wait_event(self.events[event - 1])

    def _copied(self, name: str, to: int, start: int, size: int, stream: int) -> None:
        self.noted(name, stream)
        fake_cuda.move(to, start, size, stream)

    def _cuMemcpyDtoHAsync(self, *given: int) -> None:
        self._copied("down", *given)

    def _cuMemcpyHtoDAsync(self, *given: int) -> None:
        self._copied("up", *given)

    def _cuMemcpyDtoDAsync(self, *given: int) -> None:
        self._copied("across", *given)

    def _cuStreamWriteValue64(self, stream: int, word: int, value: int, flags: int) -> None:
        fake_cuda.write(word, value, stream)

    def _cuStreamWaitValue64(self, stream: int, word: int, value: int, flags: int) -> None:
        fake_cuda.wait(word, value, stream)

    def _cuLaunchKernel(self, function: int, *given: int) -> None:
        grid, _, _, block, _, _, shared, stream, arguments, extra = given
        assert (shared, extra) == (0, 0)
        kernels, name = fake_cuda.Kernels.known[function - 1]
        addresses = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        if name in WORDS:
            found: list[Any] = [
                ctypes.c_uint64.from_address(addresses[place] or 0) for place in range(WORDS[name])
            ]
        else:
            found = [Call.from_address(addresses[0] or 0)]
        kernels.function(name)(grid, block, stream, found)
