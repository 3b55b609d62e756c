"""Backend `emulated`: one rank of several alone on a device. Its peers are a defined stand-in.

What peers bring, so that a step stays of its usual kind (no answer of it means anything):

* to a sum: one fixed sample of noise, `NOISE_STD` wide, the same for every message; to counts: what
  this rank counted;
* to rows or columns of numbers: this rank's own, turned by ``p / N`` of a row for peer p;
* to rows of bytes: this rank's own;
* to rows of expert ids: this rank's own, ``p / N`` of the experts further on, so that its own
  experts get just the mean load.

How long: as long as the plan's backend is predicted to need on the machine that is named, from the
call's beginning on. A device also moves the bytes that this rank would send and receive over its
own link, through pinned host memory. Calls that take longer than was predicted are counted as late.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from metainfer.comm import driver, layout
from metainfer.comm.backends.calls import checked
from metainfer.comm.backends.cuda import MAX_THREADS, module
from metainfer.comm.loader import Variant
from metainfer.comm.plan import CommPlan
from metainfer.comm.request import Op, Request, shard
from metainfer.core.errors import InternalError

NOISE_STD = 0.02
NOISE = 1 << 22
"""Elements of the noise; longer messages get it over and over."""
ROOM = 32 << 20
"""Bytes of host memory that messages go through, over and over."""
BLOCK_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Waited:
    """What collectives took. `us`: microseconds in them, none of which overlaps with compute;
    `late` of them took `late_us` longer than predicted, by what this rank itself does."""

    calls: int = 0
    us: float = 0.0
    late: int = 0
    late_us: float = 0.0

    def __add__(self, other: Waited) -> Waited:
        return Waited(
            self.calls + other.calls,
            self.us + other.us,
            self.late + other.late,
            self.late_us + other.late_us,
        )

    def __sub__(self, other: Waited) -> Waited:
        return self + Waited(-other.calls, -other.us, -other.late, -other.late_us)


@dataclass(frozen=True, slots=True)
class Price:
    """One collective as predicted: microseconds, and bytes that this rank sends and receives."""

    us: float
    down: int = 0
    up: int = 0


class Wait(Protocol):
    """How a device lets time pass. One collective at a time."""

    def begin(self) -> None: ...

    def finish(self, price: Price, given: Tensor) -> None:
        """Return, or let the stream go on, `price.us` after `begin`."""
        ...

    def seen(self) -> Waited: ...


class EmulatedComm:
    """Rank 0 of a group. `price`: what a plan's backend would need; `experts`: of a layer."""

    def __init__(self, wait: Wait, price: Callable[[CommPlan], Price], experts: int = 0) -> None:
        self._wait, self._price, self._experts = wait, price, experts
        self._prices: dict[Request, Price] = {}
        self._noise: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def run(self, plan: CommPlan, given: Tensor, out: Tensor | None = None) -> Tensor:
        """This rank's result with the stand-in for its peers, no sooner than predicted."""
        request = plan.request
        out = checked(request, 0, given, out, given.device.type)
        price = self._prices.get(request)
        if price is None:
            price = self._prices[request] = self._price(plan)
        self._wait.begin()
        self._stand_in(request, given, out)
        self._wait.finish(price, given)
        return out

    def close(self) -> None:
        self._noise.clear()

    def _stand_in(self, request: Request, given: Tensor, out: Tensor) -> None:
        if request.op is Op.ALL_GATHER:
            _gathered(given, out, request.world, self._experts)
        elif request.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
            begin, end = 0, request.count
            if request.op is Op.REDUCE_SCATTER:
                begin, end = shard(request.count, request.world, 0)
            self._summed(given.view(-1)[begin:end], out.view(-1), request.world)
        elif request.op is not Op.BARRIER and out.data_ptr() != given.data_ptr():
            out.copy_(given)

    def _summed(self, given: Tensor, out: Tensor, world: int) -> None:
        if not given.is_floating_point():
            torch.mul(given, world, out=out)
            return
        key = (given.dtype, given.device)
        if key not in self._noise:
            drawn = torch.randn(NOISE, generator=torch.Generator().manual_seed(0)) * NOISE_STD
            self._noise[key] = drawn.to(given.device, given.dtype)
        noise = self._noise[key]
        for begin in range(0, given.numel(), NOISE):
            part = given[begin : begin + NOISE]
            torch.add(part, noise[: part.numel()], out=out[begin : begin + NOISE])


def _gathered(given: Tensor, out: Tensor, world: int, experts: int) -> None:
    """Fill `out` [world, *given.shape]: this rank's part first."""
    if out.numel() != world * given.numel():
        raise InternalError("a rank alone gathers equal parts only")
    parts = out.view(world, *given.shape)
    if not given.is_floating_point():
        parts.copy_(given.expand(world, *given.shape))
        if experts and given.dtype != torch.uint8:
            ahead = torch.arange(world, dtype=given.dtype, device=given.device) * experts // world
            parts.add_(ahead.view(world, *[1] * given.dim())).remainder_(experts)
        return
    rows = given.reshape(-1, given.shape[-1])
    width = rows.shape[1]
    twice = torch.cat((rows, rows), dim=1)  # [T, 2 D]: a turned row is a slice of it
    turned = twice.as_strided((world, *rows.shape), (width // world, 2 * width, 1))
    parts.copy_(turned.view(world, *given.shape) if given.dim() == 1 else turned.reshape_as(parts))


class HostWait:
    """Time on the host's clock: sleeps most of it, for the rest hands its core to others."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._mark = 0.0
        self._seen = Waited()

    def begin(self) -> None:
        self._mark = self._clock()

    def finish(self, price: Price, given: Tensor) -> None:
        due = self._mark + price.us / 1e6
        late = self._clock() - due
        while (left := due - self._clock()) > 0:
            if left > 1e-3:
                self._sleep(left - 0.5e-3)
            else:
                os.sched_yield()
        us = (self._clock() - self._mark) * 1e6
        self._seen += Waited(1, us, int(late > 0), max(0.0, late) * 1e6)

    def seen(self) -> Waited:
        return self._seen


class _Alone(ctypes.Structure):
    """``MiAlone`` of ``kernels.cu``."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("mark", "input", "size", "host", "scratch", "room", "down", "up", "ns", "seen")
    )


class DeviceWait:
    """Time on the device's clock, on the current stream; may be captured in a graph."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._mark = torch.zeros(1, dtype=torch.int64, device=f"cuda:{index}")
        self._scratch = torch.empty(ROOM, dtype=torch.uint8, device=f"cuda:{index}")
        self._host = torch.zeros(ROOM, dtype=torch.uint8).pin_memory()
        self._counts = torch.zeros(4, dtype=torch.int64).pin_memory()
        loaded = module(Variant(2, layout.BYTES), index)
        self._begin, self._alone = loaded.function("mi_mark"), loaded.function("mi_alone")

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._index).cuda_stream)

    def begin(self) -> None:
        self._begin(1, 1, self._stream(), [driver.u64(self._mark.data_ptr())])

    def finish(self, price: Price, given: Tensor) -> None:
        call = _Alone(
            mark=self._mark.data_ptr(),
            input=given.data_ptr(),
            size=given.numel() * given.element_size() if given.data_ptr() % 16 == 0 else 0,
            host=self._host.data_ptr(),
            scratch=self._scratch.data_ptr(),
            room=ROOM,
            down=price.down,
            up=price.up,
            ns=int(price.us * 1e3),
            seen=self._counts.data_ptr(),
        )
        blocks = min(layout.BLOCKS, max(1, -(-max(price.down, price.up) // BLOCK_BYTES)))
        self._alone(blocks, MAX_THREADS, self._stream(), [call])

    def seen(self) -> Waited:
        """Of what the device is done with."""
        calls, ns, late, late_ns = self._counts.tolist()
        return Waited(calls, ns / 1e3, late, late_ns / 1e3)
