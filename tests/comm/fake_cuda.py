"""A device that is this host: streams are threads, kernels run by `kernels_on_host.cpp`.

Enough of `torch.cuda` and of the driver for `backends/cuda.py` and `backends/cuda_copy.py`, so that
their order of copies, flags and sums can be tested without a card.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from metainfer.comm import layout
from metainfer.comm.layout import Call, Code, ErrorRecord


class Stream:
    """Work in order, on a thread of its own."""

    known: list[Stream] = []
    _making = threading.Lock()

    def __init__(self, device: int = 0, priority: int = 0) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.last: Future[Any] | None = None
        with self._making:
            self.known.append(self)
            self.cuda_stream = len(self.known) - 1

    def do(self, step: Callable[[], Any]) -> None:
        self.last = self._pool.submit(step)

    def synchronize(self) -> None:
        if self.last is not None:
            self.last.result(60)

    def wait_event(self, event: Event) -> None:
        done = event.done
        if done is not None:
            self.do(lambda: done.result(60))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self, **_: Any) -> None:
        self.done: Future[Any] | None = None

    def record(self, stream: Stream) -> None:
        self.done = stream.last


class Cuda:
    """`torch.cuda` as far as it is used."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self._threads = threading.local()

    @property
    def current(self) -> Stream:
        """Of this thread, as a device's is."""
        if not hasattr(self._threads, "current"):
            self._threads.current = Stream()
        found: Stream = self._threads.current
        return found

    @current.setter
    def current(self, stream: Stream) -> None:
        self._threads.current = stream

    def current_stream(self, device: int = 0) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self, device: int = 0) -> None:
        for stream in Stream.known:
            stream.synchronize()

    def set_device(self, device: int) -> None:
        pass

    def is_current_stream_capturing(self) -> bool:
        return False

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return 9, 0


class Torch:
    """`torch` with host memory where a device is named."""

    def __init__(self) -> None:
        self.cuda = Cuda()

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("zeros", "empty"):
            return found

        def make(*sizes: Any, device: Any = None, **options: Any) -> torch.Tensor:
            made: torch.Tensor = found(*sizes, **options)
            return made

        return make


class Kernels:
    """Functions by name; a rank has a copy of the library, for its shared memory is static.

    `wait`: a launch returns when it is done, for callers that go on with torch, which knows no
    streams here.
    """

    known: list[tuple[Kernels, str]] = []

    def __init__(self, built: Path, *, wait: bool = False) -> None:
        self._built, self._wait = built, wait
        self._copies: dict[str, Any] = {}
        self.early: set[tuple[str, bool]] = set()  # kernels by name, whether they came early
        self._lock = threading.Lock()

    def library(self, name: str) -> Any:
        with self._lock:
            if name not in self._copies:
                own = self._built.with_name(f"fake-{name}.so")
                if not own.exists():  # never over one that is loaded
                    shutil.copy(self._built, own)
                self._copies[name] = (ctypes.CDLL(str(own)).run_block, threading.Lock())
            return self._copies[name]

    def function(self, name: str) -> Callable[..., None]:
        def launch(
            grid: int, block: int, stream: int, arguments: Sequence[Any], early: bool = False
        ) -> None:
            self.early.add((name, early))
            values = [
                Call.from_buffer_copy(each) if isinstance(each, Call) else each.value
                for each in arguments
            ]
            step = self.mi_kernel if name in layout.KERNELS.values() else getattr(self, name)
            Stream.known[stream].do(lambda: step(grid, block, *values))
            if self._wait:
                Stream.known[stream].synchronize()

        handle = len(self.known) + 1
        self.known.append((self, name))
        setattr(launch, "handle", handle)  # noqa: B010 - a function has no such field
        return launch

    def mi_kernel(self, grid: int, block: int, call: Call) -> None:
        self._run(f"rank{call.rank}", grid, call, 0)

    def mi_add(self, grid: int, block: int, call: Call) -> None:
        self._run("add", grid, call, 1)

    def _run(self, name: str, grid: int, call: Call, add: int) -> None:
        run, lock = self.library(name)
        with lock:
            for index in range(grid):
                assert run(ctypes.byref(call), 32, add, index, grid) == 0, "misaligned"

    def mi_clear(self, grid: int, block: int, slab: int, state: int, calls: int) -> None:
        ctypes.memset(slab, 0, layout.HEAD)
        for at in range(layout.HEADER, layout.HEAD, layout.FLAG_STEP):
            ctypes.c_uint64.from_address(slab + at).value = calls & ((1 << 40) - 1)
        ctypes.c_uint64.from_address(state).value = calls

    def mi_post(self, grid: int, block: int, at: int, value: int) -> None:
        ctypes.c_uint64.from_address(at).value = value

    def mi_await(
        self, grid: int, block: int, at: int, value: int, abort: int, error: int, ns: int, peer: int
    ) -> None:
        end = time.monotonic_ns() + ns
        while ctypes.c_uint64.from_address(at).value < value:
            told = ctypes.c_uint64.from_address(abort).value
            if told or time.monotonic_ns() > end:
                record = ErrorRecord.from_address(error)
                record.peer, record.wanted = peer, value
                record.code = Code.ABORTED if told else Code.TIMEOUT
                return
            time.sleep(0.0002)


def move(target: int, source: int, size: int, stream: int) -> None:
    """A copy that takes a while, so that what should wait for it is seen not to."""

    def copy() -> None:
        time.sleep(random.random() * 2e-3)
        ctypes.memmove(target, source, size)

    Stream.known[stream].do(copy)


def write(target: int, value: int, stream: int) -> None:
    """A counter, written by the stream itself."""
    Stream.known[stream].do(lambda: setattr(ctypes.c_uint64.from_address(target), "value", value))


def wait(source: int, value: int, stream: int) -> None:
    """A counter, awaited by the stream itself: it gives up for nobody."""

    def await_it() -> None:
        end = time.monotonic() + 60
        while ctypes.c_uint64.from_address(source).value < value:
            assert time.monotonic() < end, "nobody let it go"
            time.sleep(0.0002)

    Stream.known[stream].do(await_it)
