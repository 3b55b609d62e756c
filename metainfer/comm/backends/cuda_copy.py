"""Long calls without peer access: copy engines through pinned host memory, in pieces.

A reduce-scatter sends parts down to host memory; their owner takes the others' up and adds in rank
order (one rounding). A gather sends a rank's rows down once, and everyone takes them up. An
all-reduce is one behind the other, piece by piece. Down and up have a stream each, so that both
directions of the link work at once, and sums a third. Between ranks a counter in host memory is
posted by a one-thread kernel behind each copy and awaited by another. These streams come before
others, for what computes meanwhile holds the multiprocessors.

One staging memory is enough: a rank writes into it only once every peer has taken all of the call
before. Not for graphs: counters grow from call to call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metainfer.comm import driver, layout
from metainfer.comm.backends.calls import checked
from metainfer.comm.backends.cuda import BUDGET_S, module
from metainfer.comm.backends.shm_cpu import ShmComm
from metainfer.comm.backends.slabs import gather_bytes
from metainfer.comm.errors import CommError
from metainfer.comm.layout import Call, Code, ErrorRecord
from metainfer.comm.loader import Variant
from metainfer.comm.pieces import element_type
from metainfer.comm.plan import CommPlan
from metainfer.comm.request import ELEMENT_BYTES, Op, Request, shard
from metainfer.comm.segment import Segment

LINE = 128
ALL, TAKEN, ABORT = layout.WORLD, layout.WORLD + 1, layout.WORLD + 2
"""What a rank posts beside what it sends to each owner: what it sends to all, calls of which it has
taken everything, and its abort word."""
WORDS = layout.WORLD + 3
COUNTERS = 16384
PIECES, LEAST_PIECE, MOST_PIECE = 8, 512 << 10, 4 << 20
_ADD_BLOCKS = 32
_FIRST = -1  # of a stream: before those of usual priority


@dataclass(frozen=True, slots=True)
class Staging:
    """Pinned host memory of a group: counters, then per rank ``part_bytes * world``: what goes to
    each owner, and in the place of its own what goes to all. `base` is as this process sees it,
    `on_device` as the device does."""

    base: int
    on_device: int
    world: int
    part_bytes: int

    @classmethod
    def size(cls, world: int, part_bytes: int) -> int:
        return COUNTERS + world * world * part_bytes

    def word(self, rank: int, which: int) -> int:
        """A counter that `rank` posts, for the device: of an owner, `ALL`, `TAKEN` or `ABORT`."""
        return self.on_device + (rank * WORDS + which) * LINE

    def part(self, rank: int, owner: int) -> int:
        """Where `rank` leaves what belongs to `owner`; to itself: what goes to all."""
        return self.base + COUNTERS + (rank * self.world + owner) * self.part_bytes


@dataclass(frozen=True, slots=True)
class _Moved:
    """A call in addresses. `own_given`, `own_out`: where this rank's part begins in what it gives
    and in what it gets. `bounds`: parts, `pieces`: of every part, begin and end in elements."""

    given: int
    out: int
    own_given: int
    own_out: int
    width: int
    bounds: tuple[tuple[int, int], ...]
    pieces: tuple[tuple[int, int], ...]


class CopyRank:
    """One rank's streams and scratch; `run` enqueues, `check` looks for a failure."""

    def __init__(
        self,
        rank: int,
        staging: Staging,
        *,
        device: int,
        budget_s: float = BUDGET_S,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world = rank, staging.world
        self.staging = staging
        self.budget_s = budget_s
        self.index = device
        self._closing = closing
        self.down, self.up, self.sums = (
            torch.cuda.Stream(device, priority=_FIRST)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._record = torch.zeros(1024, dtype=torch.uint8).pin_memory()
        self._scratch = torch.empty(
            self.world * staging.part_bytes, dtype=torch.uint8, device=f"cuda:{device}"
        )
        self.piece_bytes = 0  # by size
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._posted = [0] * WORDS
        self._seen = [[0] * WORDS for _ in range(self.world)]
        for seen in self._seen:
            seen[TAKEN] = -1  # before the first call nothing is to be taken
        self._load(layout.TYPES["bfloat16"])

    def _load(self, type_code: int) -> None:
        loaded = module(Variant(self.world, type_code), self.index)
        self._post, self._await, self._add = (
            loaded.function(name) for name in ("mi_post", "mi_await", "mi_add")
        )

    def run(self, plan: CommPlan, given: Tensor, out: Tensor | None = None) -> Tensor:
        """Carry `plan` out behind what the current stream holds.

        Raises:
            CommError: an earlier call failed.
        """
        self.check()
        request = plan.request
        out = checked(request, self.rank, given, out, "cuda")
        main, streams = torch.cuda.current_stream(self.index), (self.down, self.up, self.sums)
        for stream in streams:
            stream.wait_stream(main)
        for peer in self._others():
            self._expect(peer, TAKEN, self.down.cuda_stream)
        moved = self._moved(request, given.data_ptr(), out.data_ptr())
        if request.op is Op.ALL_GATHER:
            self._send_own(moved)
        else:
            self._load(element_type(request))
            self._send_parts(moved)
            self._sum_own(moved, request.dtype, to_all=request.op is Op.ALL_REDUCE)
        if request.op is not Op.REDUCE_SCATTER:
            self._take(moved)
        self._tell(TAKEN, self.up.cuda_stream)
        for stream in streams:
            main.wait_stream(stream)
        return out

    def _moved(self, request: Request, given: int, out: int) -> _Moved:
        """Where `request` moves what. A sum of all has parts of whole packs."""
        width, world, count = ELEMENT_BYTES[request.dtype], self.world, request.count
        bounds = tuple(shard(count, world, p) for p in range(world))
        if request.op is Op.ALL_REDUCE:
            share = -(-count // (world * 8)) * 8
            bounds = tuple(
                (min(count, p * share), min(count, (p + 1) * share)) for p in range(world)
            )
        share = max(end - begin for begin, end in bounds)
        begin = bounds[self.rank][0]
        own_given, own_out = given + begin * width, out + begin * width
        if request.op is Op.ALL_GATHER:
            own_given = given
        elif request.op is Op.REDUCE_SCATTER:
            own_out = out
        size = self.piece_bytes or min(MOST_PIECE, max(LEAST_PIECE, share * width // PIECES))
        pieces = tuple(_pieces(share, size // width // 8 * 8))
        while len(self._events) < len(pieces):
            came, added = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
            self._events.append((came, added))
        return _Moved(given, out, own_given, own_out, width, bounds, pieces)

    def _others(self) -> list[int]:
        """The peers, the next one first."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _send_own(self, moved: _Moved) -> None:
        """This rank's rows to all, and to their place in its own result."""
        stream, to = self.down.cuda_stream, self.staging.part(self.rank, self.rank)
        for at, size in self._own(moved):
            if size:
                driver.copy_down(to + at, moved.own_given + at, size, stream)
            self._tell(ALL, stream)
        begin, end = moved.bounds[self.rank]
        if end > begin:
            size = (end - begin) * moved.width
            driver.copy_across(moved.own_out, moved.own_given, size, self.sums.cuda_stream)

    def _send_parts(self, moved: _Moved) -> None:
        """To each owner its part of what is given."""
        stream, width = self.down.cuda_stream, moved.width
        for begin, end in moved.pieces:
            for p in self._others():
                a, b = _clip(moved.bounds[p], begin, end)
                if b > a:
                    to = self.staging.part(self.rank, p) + begin * width
                    driver.copy_down(to, moved.given + a * width, (b - a) * width, stream)
                self._tell(p, stream)

    def _sum_own(self, moved: _Moved, dtype: str, *, to_all: bool) -> None:
        """The sum of this rank's part, sent on `to_all` or not."""
        up, down, room = self.up.cuda_stream, self.down.cuda_stream, self.staging.part_bytes
        for (at, size), (came, added) in zip(self._own(moved), self._events, strict=False):
            sources = [self._scratch.data_ptr() + q * room + at for q in range(self.world)]
            sources[self.rank] = moved.own_given + at
            for q in range(self.world):
                if q == self.rank:
                    continue
                self._expect(q, self.rank, up)
                if size:
                    driver.copy_up(sources[q], self.staging.part(q, self.rank) + at, size, up)
            came.record(self.up)
            self.sums.wait_event(came)
            if size:
                self._sum(sources, moved.own_out + at, size // moved.width, moved.width, dtype)
            if not to_all:
                continue
            added.record(self.sums)
            self.down.wait_event(added)
            if size:
                to = self.staging.part(self.rank, self.rank) + at
                driver.copy_down(to, moved.own_out + at, size, down)
            self._tell(ALL, down)

    def _take(self, moved: _Moved) -> None:
        """What peers sent to all."""
        stream, width = self.up.cuda_stream, moved.width
        for begin, end in moved.pieces:
            for p in self._others():
                a, b = _clip(moved.bounds[p], begin, end)
                self._expect(p, ALL, stream)
                if b > a:
                    start = self.staging.part(p, p) + begin * width
                    driver.copy_up(moved.out + a * width, start, (b - a) * width, stream)

    def _own(self, moved: _Moved) -> list[tuple[int, int]]:
        """Begin in this rank's part and size of each piece, in bytes; those past its end have none."""
        found = []
        for begin, end in moved.pieces:
            a, b = _clip(moved.bounds[self.rank], begin, end)
            found.append((begin * moved.width, (b - a) * moved.width))
        return found

    def _sum(self, sources: Sequence[int], to: int, count: int, width: int, dtype: str) -> None:
        call = Call(
            world=self.world, type=layout.TYPES[dtype], width=width, unit=16 // width, output=to
        )
        call.slab[: self.world] = sources
        call.in_len[0] = count
        self._add(_ADD_BLOCKS, 512, self.sums.cuda_stream, [call])

    def _tell(self, which: int, stream: int) -> None:
        self._posted[which] += 1
        word = self.staging.word(self.rank, which)
        self._post(1, 1, stream, [driver.u64(word), driver.u64(self._posted[which])])

    def _expect(self, peer: int, which: int, stream: int) -> None:
        self._seen[peer][which] += 1
        values = (
            self.staging.word(peer, which),
            self._seen[peer][which],
            self.staging.word(self.rank, ABORT),
            self._record.data_ptr(),
            int(self.budget_s * 1e9),
            peer,
        )
        self._await(1, 1, stream, [driver.u64(value) for value in values])

    def close(self) -> None:
        """Wait for the device and give the staging memory back."""
        torch.cuda.synchronize(self.index)
        self._closing()
        self._closing = lambda: None

    def abort(self, rank: int | None = None) -> None:
        """Let the waits of `rank` end, this one's by default."""
        word = self.staging.word(self.rank if rank is None else rank, ABORT)
        word += self.staging.base - self.staging.on_device
        ctypes.c_uint64.from_address(word).value = 1

    def check(self) -> None:
        """Raise what a wait has written down.

        Raises:
            CommError: a peer did not come, or this rank was told to give up.
        """
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
    """Copies between processes, through staging memory of the name `token`. Collective.

    `make` plans the exchanges over `control`; a message may have `part_bytes` times the ranks.

    Raises:
        UserError: the memory cannot be had or registered.
    """
    torch.zeros(1, device=f"cuda:{device}")
    size = Staging.size(control.world, part_bytes)
    if control.rank == 0:
        segment = Segment.create(token, size, lambda address: None)
    gather_bytes(control, make, b"made")
    if control.rank != 0:
        segment = Segment.open(token, size, 0.0)
    gather_bytes(control, make, b"open")
    if control.rank == 0:
        segment.unlink()
    on_device = driver.register_host(segment.address, size)
    staging = Staging(segment.address, on_device, control.world, part_bytes)

    def closing() -> None:
        driver.unregister_host(segment.address)
        segment.close()

    return CopyRank(control.rank, staging, device=device, budget_s=budget_s, closing=closing)


def _pieces(share: int, size: int) -> list[tuple[int, int]]:
    """A part cut into pieces of at most `size` elements; one empty piece for none."""
    return [(at, min(share, at + size)) for at in range(0, share, size)] or [(0, 0)]


def _clip(bounds: tuple[int, int], begin: int, end: int) -> tuple[int, int]:
    """Where a piece of a part lies in the message."""
    start, stop = bounds
    return min(stop, start + begin), min(stop, start + end)
