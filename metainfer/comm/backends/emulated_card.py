"""One rank alone on a card: its stand-in, bytes and time, by one launch a call (``alone.cu``).

Bytes cross the card's link through pinned host memory: by the kernel, or by copy engines where the
plan's backend has them, in pieces like its own. The time of a call is that of one in a graph, its
launch included, so what a launch takes beside the kernel's own time is measured once and is part of
the price. A copied call is two launches: one stands in while engines copy, one waits and counts.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from metainfer.comm import driver, layout, loader
from metainfer.comm.backends.cuda import MAX_THREADS, module
from metainfer.comm.backends.emulated import Form, Price, StandIn, Waited

ROOM = 32 << 20
"""Bytes of host memory that messages go through, over and over."""
PIECE = 4 << 20
"""Bytes of a copy: what engines carry at the link's rate."""
BLOCK_BYTES = 16 << 10
BLOCKS = 64
"""Of a call at most; all of them wait, so all must be resident."""
CALLS = 64
"""In the graph that a launch is timed by, and how long each of them waits there."""
TIMED_NS = 20_000


class Alone(ctypes.Structure):
    """``MiAlone`` of ``alone.cu``."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("given", "out", "noise", "period", "rows", "width", "turn", "unit", "type", "form"),
            *("world", "experts", "numbers", "host", "scratch", "room", "down", "up"),
            *("begun", "mark", "ns", "ticket", "counts", "seen"),
        )
    )


class DeviceWait:
    """Time on the device's clock, on the current stream; may be captured in a graph.

    `launch_us`: of a call beside the time that its kernel sees; None: measured here.
    """

    def __init__(self, index: int, launch_us: float | None = None) -> None:
        self._index = index
        self._scratch = torch.zeros(ROOM, dtype=torch.uint8, device=f"cuda:{index}")
        self._host = torch.zeros(ROOM, dtype=torch.uint8).pin_memory()
        self._words = torch.zeros(8, dtype=torch.int64, device=f"cuda:{index}")
        self._seen = torch.zeros(4, dtype=torch.int64).pin_memory()
        self._alone = module(loader.Alone(), index).function("mi_alone")
        self._down, self._up = (
            torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self._launch_us = self._timed_launch() if launch_us is None else launch_us
        self._first = self._seen.clone()

    def carry(self, call: StandIn, price: Price) -> None:
        made = self._call(call)
        made.ns = max(0, int((price.us - self._launch_us) * 1e3))
        if not price.copied:
            made.down, made.up = price.down, price.up
            self._launch(made, max(price.down, price.up, _bytes(call.out)))
            return
        main = torch.cuda.current_stream(self._index)
        begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
        begun.record(main)
        made.mark = self._words[1:].data_ptr()
        self._launch(made, _bytes(call.out))
        self._copy(price, call.given, begun)
        for stream in (self._down, self._up):
            main.wait_stream(stream)
        self._launch(self._call(None, begun=made.mark, ns=made.ns), 0)

    def seen(self) -> Waited:
        """Of what the device is done with."""
        calls, ns, late, late_ns = (self._seen - self._first).tolist()
        return Waited(calls, ns / 1e3 + calls * self._launch_us, late, late_ns / 1e3)

    def _call(self, call: StandIn | None, **more: int) -> Alone:
        found = Alone(
            host=self._host.data_ptr(),
            scratch=self._scratch.data_ptr(),
            room=ROOM,
            ticket=self._words.data_ptr(),
            counts=self._words[4:].data_ptr(),
            seen=self._seen.data_ptr(),
            **more,
        )
        if call is None:
            return found
        found.form, found.given, found.out = call.form, call.given.data_ptr(), call.out.data_ptr()
        found.world, found.rows = call.world, call.rows
        found.experts, found.numbers = call.experts, call.numbers
        size, found.width, found.turn = call.given.element_size(), call.width, call.turn
        found.unit = size
        if call.form is Form.PARTS:  # whole packs where rows, turns and addresses are
            found.unit = math.gcd(16, call.width * size, call.turn * size, found.given, found.out)
            found.width, found.turn = (
                call.width * size // found.unit,
                call.turn * size // found.unit,
            )
        if call.noise is not None:
            found.noise, found.period = call.noise.data_ptr(), call.noise.numel()
            found.type = layout.TYPES[str(call.given.dtype).removeprefix("torch.")]
        return found

    def _launch(self, call: Alone, size: int) -> None:
        stream = int(torch.cuda.current_stream(self._index).cuda_stream)
        self._alone(min(BLOCKS, max(1, -(-size // BLOCK_BYTES))), MAX_THREADS, stream, [call])

    def _copy(self, price: Price, given: Tensor, begun: torch.cuda.Event) -> None:
        """Both ways at once, behind what the current stream held."""
        host, scratch, start = (x.data_ptr() for x in (self._host, self._scratch, given))
        down, up = self._down.cuda_stream, self._up.cuda_stream
        self._down.wait_event(begun)
        self._up.wait_event(begun)
        for at in range(0, max(price.down, price.up), PIECE):
            room = at % ROOM
            if (size := min(PIECE, price.down - at)) > 0:
                driver.copy_down(host + room, start + at, size, down)
            if (size := min(PIECE, price.up - at)) > 0:
                driver.copy_up(scratch + room, host + room, size, up)

    def _timed_launch(self) -> float:
        """Microseconds of a call in a graph beside those that its kernel waits."""
        side = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        side.wait_stream(torch.cuda.current_stream(self._index))
        with torch.cuda.stream(side):
            self._launch(self._call(None, ns=TIMED_NS), 0)  # loads the kernel
            with torch.cuda.graph(graph, stream=side):
                for _ in range(CALLS):
                    self._launch(self._call(None, ns=TIMED_NS), 0)
            graph.replay()
            begin.record(side)
            graph.replay()
            end.record(side)
            side.synchronize()
        took_us = float(begin.elapsed_time(end)) * 1e3 / CALLS
        return max(0.0, took_us - TIMED_NS / 1e3)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
