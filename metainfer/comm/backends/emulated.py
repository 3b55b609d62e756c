"""Backend `emulated`: one rank of several alone on a device. Its peers are a defined stand-in.

What peers bring, so that a step stays of its usual kind (no answer of it means anything):

* to a sum: one fixed sample of noise, `NOISE_STD` wide, the same for every message; to counts: what
  this rank counted;
* to rows or columns of numbers: this rank's own, turned by ``p / N`` of a row for peer p;
* to other rows: this rank's own, numbers of experts among them ``p / N`` of the experts further
  on, so that its own experts get just the mean load.

How long: as long as the plan's backend is predicted to need on the machine that is named, from the
call's beginning on. A device (`emulated_card.py`) also moves the bytes that this rank would send
and receive over its own link. Calls that take longer than was predicted are counted as late.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from metainfer.comm.backends.calls import checked
from metainfer.comm.plan import CommPlan
from metainfer.comm.request import Op, Request, shard
from metainfer.core.errors import InternalError

NOISE_STD = 0.02
NOISE = 1 << 22
"""Elements of the noise; longer messages get it over and over."""


class Form(IntEnum):
    """What a result is made of; the codes of ``alone.cu``."""

    STAYS = 0  # what it is
    PARTS = 1  # this rank's rows for every rank, each turned further than the one before
    IDS = 2  # this rank's rows for every rank, numbers of experts in them further on
    NOISY = 3  # this rank's elements with noise
    TIMES = 4  # this rank's counts times the ranks


@dataclass(frozen=True, slots=True)
class StandIn:
    """One call's result: `out` of `given`. `world` parts of `rows` [rows, width]; a part is turned
    by `turn` elements more than the one before, or its last `numbers` columns, int32, are
    ``experts / world`` further on."""

    form: Form
    given: Tensor
    out: Tensor
    world: int = 1
    rows: int = 1
    width: int = 0
    turn: int = 0
    experts: int = 0
    numbers: int = 0
    noise: Tensor | None = None

    def fill(self) -> None:
        """The definition, in torch."""
        if self.form is Form.PARTS:
            self._turned()
        elif self.form is Form.IDS:
            parts = self.out.view(self.world, self.rows, self.width)
            parts.copy_(self.given.view(1, self.rows, self.width))
            ahead = torch.arange(self.world, dtype=torch.int32) * self.experts // self.world
            moved = parts[..., self.width - self.numbers :]
            moved.add_(ahead.view(-1, 1, 1)).remainder_(self.experts)
        elif self.form is Form.NOISY:
            assert self.noise is not None
            for begin in range(0, self.width, NOISE):
                part = self.given[begin : begin + NOISE]
                torch.add(part, self.noise[: part.numel()], out=self.out[begin : begin + NOISE])
        elif self.form is Form.TIMES:
            torch.mul(self.given, self.world, out=self.out)

    def _turned(self) -> None:
        rows = self.given.view(self.rows, self.width)
        twice = torch.cat((rows, rows), dim=1)  # [rows, 2 width]: a turned row is a slice of it
        shape = (self.world, self.rows, self.width)
        self.out.view(shape).copy_(twice.as_strided(shape, (self.turn, 2 * self.width, 1)))


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
    """One collective as predicted: microseconds, bytes that this rank sends and receives, and
    whether copy engines carry them."""

    us: float
    down: int = 0
    up: int = 0
    copied: bool = False


class Wait(Protocol):
    """How a device stands in and lets time pass. One collective at a time."""

    def carry(self, call: StandIn, price: Price) -> None:
        """Fill ``call.out`` and return, or let the stream go on, after `price.us`."""
        ...

    def seen(self) -> Waited: ...


class EmulatedComm:
    """Rank 0 of a group. `price`: what a plan's backend would need; `experts`: of a layer."""

    def __init__(self, wait: Wait, price: Callable[[CommPlan], Price], experts: int = 0) -> None:
        self._wait, self._price, self._experts = wait, price, experts
        self._prices: dict[Request, Price] = {}
        self._noise: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def run(
        self, plan: CommPlan, given: Tensor, out: Tensor | None = None, *, numbers: int = 0
    ) -> Tensor:
        """This rank's result with the stand-in for its peers, no sooner than predicted. Of rows
        that are gathered the last `numbers` columns, int32, are numbers of experts."""
        request = plan.request
        out = checked(request, 0, given, out, given.device.type)
        price = self._prices.get(request)
        if price is None:
            price = self._prices[request] = self._price(plan)
        self._wait.carry(self._stand_in(request, given, out, numbers), price)
        return out

    def close(self) -> None:
        self._noise.clear()

    def _stand_in(self, request: Request, given: Tensor, out: Tensor, numbers: int) -> StandIn:
        world, flat = request.world, given.view(-1)
        if request.op is Op.ALL_GATHER:
            return self._gathered(given, out, world, numbers)
        if request.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
            begin, end = 0, request.count
            if request.op is Op.REDUCE_SCATTER:
                begin, end = shard(request.count, world, 0)
            part, form = flat[begin:end], Form.TIMES
            noise = None
            if given.is_floating_point():
                form, noise = Form.NOISY, self._noise_like(given)
            return StandIn(form, part, out.view(-1), world, width=end - begin, noise=noise)
        if request.op is Op.BARRIER or out.data_ptr() == given.data_ptr():
            return StandIn(Form.STAYS, flat, out.view(-1))
        return StandIn(Form.PARTS, flat, out.view(-1), width=flat.numel())

    def _gathered(self, given: Tensor, out: Tensor, world: int, numbers: int) -> StandIn:
        """`out` [world, *given.shape]: this rank's part first."""
        if out.numel() != world * given.numel():
            raise InternalError("a rank alone gathers equal parts only")
        width = given.shape[-1]
        rows = given.numel() // width if width else 0
        if numbers:
            experts = self._experts
            return StandIn(Form.IDS, given, out, world, rows, width, 0, experts, numbers)
        turn = width // world if given.is_floating_point() else 0
        return StandIn(Form.PARTS, given, out, world, rows, width, turn)

    def _noise_like(self, given: Tensor) -> Tensor:
        key = (given.dtype, given.device)
        if key not in self._noise:
            drawn = torch.randn(NOISE, generator=torch.Generator().manual_seed(0)) * NOISE_STD
            self._noise[key] = drawn.to(given.device, given.dtype)
        return self._noise[key]


class HostWait:
    """Time on the host's clock: sleeps most of it, for the rest hands its core to others."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._seen = Waited()

    def carry(self, call: StandIn, price: Price) -> None:
        begin = self._clock()
        call.fill()
        due = begin + price.us / 1e6
        late = self._clock() - due
        while (left := due - self._clock()) > 0:
            if left > 1e-3:
                self._sleep(left - 0.5e-3)
            else:
                os.sched_yield()
        us = (self._clock() - begin) * 1e6
        self._seen += Waited(1, us, int(late > 0), max(0.0, late) * 1e6)

    def seen(self) -> Waited:
        return self._seen
