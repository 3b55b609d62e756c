"""Long calls without peer access: copy engines through pinned host memory, in pieces.

`copy_order` has which steps and in which order, `enqueue` carries them out. A stream that waits for
a counter by itself has neither a budget of time nor an ear for an abort: a thread (`copy_watch`)
has both and lets it go; so each counter is there once for every reader. A kernel that waits instead
has them, and stands in line for room beside what computes meanwhile, for every piece anew. The
streams come before others, for sums want room, too.

Not for graphs: counters grow from call to call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from metainfer.comm import driver, layout
from metainfer.comm.backends.calls import checked
from metainfer.comm.backends.copy_order import (
    ABORT,
    BASES,
    BUDGET,
    GIVEN,
    OUT,
    STREAM,
    TAKEN,
    WORDS,
    Means,
    Order,
    Staging,
    seen,
)
from metainfer.comm.backends.copy_watch import FAR, Missing, Watch
from metainfer.comm.backends.cuda import BUDGET_S, module
from metainfer.comm.backends.shm_cpu import ShmComm, share
from metainfer.comm.enqueue import Loop, Program
from metainfer.comm.errors import CommError
from metainfer.comm.layout import Code, ErrorRecord
from metainfer.comm.loader import Variant
from metainfer.comm.plan import CommPlan
from metainfer.comm.request import Request

PROVEN_PIECE = 16 << 10
PROGRAMS = 64
"""Calls whose steps a rank keeps: a chunk's sums have one size in all layers."""
_FIRST = -1  # of a stream: before those of usual priority


class CopyRank:
    """One rank's streams and scratch; `run` enqueues, `check` looks for a failure.

    `by_streams`: they write and await counters themselves; None: where the device can.
    """

    def __init__(
        self,
        rank: int,
        staging: Staging,
        *,
        device: int,
        budget_s: float = BUDGET_S,
        by_streams: bool | None = None,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world = rank, staging.world
        self.staging = staging
        self.budget_s = budget_s
        self.index = device
        self.by_streams = driver.counts(device) if by_streams is None else by_streams
        self._closing = closing
        self._streams = {
            name: torch.cuda.Stream(device, priority=_FIRST)  # type: ignore[no-untyped-call]
            for name in ("down", "up", "sums", "posts", "waits")
        }
        self._record = torch.zeros(1024, dtype=torch.uint8).pin_memory()
        self._scratch = torch.empty(
            self.world * staging.part_bytes, dtype=torch.uint8, device=f"cuda:{device}"
        )
        self._open = threading.Lock()  # held while the staging memory is looked at from a thread
        self._closed = False
        self.piece_bytes = 0  # by size
        self._events: list[int] = []
        self._bases = (ctypes.c_int64 * BASES)()
        for peer in range(self.world):
            self._bases[seen(peer, TAKEN)] = -1  # before the first call nothing is to be taken
        self._function(layout.TYPES["bfloat16"], "mi_add")
        self._program = lru_cache(maxsize=PROGRAMS)(self._written)
        self.enqueue, self._broken = Loop(driver.in_streams()), ""
        self._watch = Watch(self) if self.by_streams else None

    def run(self, plan: CommPlan, given: Tensor, out: Tensor | None = None) -> Tensor:
        """Carry `plan` out behind what the current stream holds.

        Raises:
            CommError: an earlier call failed.
            CudaError: the driver refused a step; peers may wait for what does not come.
        """
        self.check()
        request, bases = plan.request, self._bases
        out = checked(request, self.rank, given, out, "cuda")
        bases[GIVEN], bases[OUT] = given.data_ptr(), out.data_ptr()
        bases[STREAM] = torch.cuda.current_stream(self.index).cuda_stream
        bases[BUDGET] = int(self.budget_s * 1e9)
        in_place = bases[GIVEN] == bases[OUT]
        program = self._program(request, in_place, self.piece_bytes, self.by_streams)
        for base, more in program.counted.items():
            bases[base] += more  # before the steps: a watch sees what they may wait for
        try:
            self.enqueue(program, bases)
        except driver.CudaError as error:
            self._broken = str(error)
            raise
        return out

    def _written(
        self, request: Request, in_place: bool, piece_bytes: int, by_streams: bool
    ) -> Program:
        """The steps of a call. What they depend on is given, for they are kept by it."""
        means = Means(
            rank=self.rank,
            staging=self.staging,
            record=self._record.data_ptr(),
            scratch=self._scratch.data_ptr(),
            post=self._function(layout.TYPES["bfloat16"], "mi_post"),
            wait=self._function(layout.TYPES["bfloat16"], "mi_await"),
            add=lambda kind: self._function(kind, "mi_add"),
            event=self._event,
            by_streams=by_streams,
            **{name: stream.cuda_stream for name, stream in self._streams.items()},
        )
        return Order(means, request, in_place=in_place, piece_bytes=piece_bytes).program()

    def _function(self, type_code: int, name: str) -> int:
        return module(Variant(self.world, type_code), self.index).function(name).handle

    def _event(self, index: int) -> int:
        """Events by number, the same ones for every call."""
        while index >= len(self._events):
            self._events.append(driver.create_event())
        return self._events[index]

    @property
    def failed(self) -> bool:
        """Whether a wait was ended by something else than its peer."""
        return bool(ErrorRecord.from_address(self._record.data_ptr()).code != Code.OK)

    @property
    def told(self) -> bool:
        """Whether this rank is to give up."""
        return self.staging.here(self.staging.word(self.rank, ABORT, self.rank)).value != 0

    def missing(self) -> list[Missing]:
        """Counters behind what is expected of them by now: peer, which, expected, found."""
        return [
            (peer, which, expected, found)
            for peer in range(self.world)
            for which in range(WORDS)
            if (expected := self._bases[seen(peer, which)])
            > (found := self._counter(peer, which).value)
        ]

    def let_go(self, code: Code, missing: list[Missing], waited_ns: int) -> None:
        """End the waits for `missing`, and write down the first of them."""
        record = ErrorRecord.from_address(self._record.data_ptr())
        if record.code == Code.OK:
            record.peer, _, record.wanted, _ = missing[0]
            record.waited_ns = waited_ns
            record.code = code
        for peer, which, *_ in missing:
            self._counter(peer, which).value = FAR

    def _counter(self, peer: int, which: int) -> ctypes.c_uint64:
        """What `peer` has counted for this rank."""
        return self.staging.here(self.staging.word(peer, which, self.rank))

    def forms(self) -> Iterator[None]:
        """Cut calls by size, then into many pieces: for a proof of both."""
        kept = self.piece_bytes
        try:
            for self.piece_bytes in (0, PROVEN_PIECE):
                yield
        finally:
            self.piece_bytes = kept

    def close(self) -> None:
        """Wait for the device and give the staging memory back."""
        try:
            torch.cuda.synchronize(self.index)
            while self._events:
                driver.destroy_event(self._events.pop())
        finally:
            if self._watch is not None:
                self._watch.close()
                self._watch = None
            with self._open:
                self._closed = True
            self._closing()
            self._closing = lambda: None

    def abort(self, rank: int | None = None) -> None:
        """Let the waits of `rank` end, this one's by default. From any thread, also after `close`:
        who watches peers keeps this rank's backends for good."""
        rank = self.rank if rank is None else rank
        with self._open:
            if not self._closed:
                self.staging.here(self.staging.word(rank, ABORT, rank)).value = 1

    def check(self) -> None:
        """Raise what a wait has written down.

        Raises:
            CommError: a peer did not come, this rank was told to give up, or steps are missing.
        """
        if self._broken:
            raise CommError(
                f"a copy-engine collective of rank {self.rank} broke off: {self._broken}"
            )
        record = ErrorRecord.from_address(self._record.data_ptr())
        if record.code == Code.OK:
            return
        peer, waited = int(record.peer), record.waited_ns / 1e9
        what = "gave up waiting for" if record.code == Code.ABORTED else "waited in vain for"
        raise CommError(
            f"a copy-engine collective failed on rank {self.rank}: it {what} rank {peer} "
            f"({waited:.1f} s).",
            peer=peer,
            secondary=record.code == Code.ABORTED,
        )


def open_copy(
    control: ShmComm,
    token: str,
    make: Callable[[Request], CommPlan],
    *,
    device: int,
    part_bytes: int,
    budget_s: float = BUDGET_S,
) -> CopyRank:
    """Copies between processes, through staging memory that they share as `token`. Collective.

    `make` plans the exchanges over `control`; a message may have `part_bytes` times the ranks.

    Raises:
        UserError: the memory cannot be had or registered.
    """
    torch.zeros(1, device=f"cuda:{device}")
    size = Staging.size(control.world, part_bytes)
    segment = share(control, token, make, size)
    try:
        on_device = driver.register_host(segment.address, size)
    except driver.CudaError:
        segment.close()
        raise
    staging = Staging(segment.address, on_device, control.world, part_bytes)

    def closing() -> None:
        driver.unregister_host(segment.address)
        segment.close()

    return CopyRank(control.rank, staging, device=device, budget_s=budget_s, closing=closing)
