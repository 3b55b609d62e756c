"""Long calls without peer access: copy engines through pinned host memory, in pieces.

A reduce-scatter sends parts down to host memory; their owner takes the others' up and adds in rank
order (one rounding). A gather sends a rank's rows down once, and everyone takes them up. An
all-reduce is one behind the other, piece by piece; between two ranks, where that carries no byte
less, everyone sends all of it and sums all of it. Pieces begin and end small: the first one's way
down and the last one's way up are hidden by nothing.

Down and up have a stream each that carries copies alone, so that both directions of the link work
at once and an engine goes from copy to copy; sums have a third. Between ranks a counter in host
memory is written behind each copy and awaited before one, on two more streams: by themselves where
a device does that, else by one-thread kernels. Such a kernel waits for room beside what computes
meanwhile, for every piece anew; a stream that waits by itself has neither a budget of time nor an
ear for an abort: a thread (`copy_watch`) has both and lets it go. So each counter is there once for
every reader. The streams come before others, for sums want room, too.

One staging memory is enough: a rank writes into it only once every peer has taken all of the call
before. Not for graphs: counters grow from call to call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metainfer.comm import driver, layout
from metainfer.comm.backends.calls import checked
from metainfer.comm.backends.copy_watch import FAR, Missing, Watch
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

LINE = 64
ALL, TAKEN, ABORT = layout.WORLD, layout.WORLD + 1, layout.WORLD + 2
"""What a rank posts beside what it sends to each owner: what it sends to all, calls of which it has
taken everything, and its abort word."""
WORDS = layout.WORLD + 3
COUNTERS = 64 << 10
LEAST_PIECE, MOST_PIECE = 2 << 20, 4 << 20
"""Bytes. Copy engines reach 84 GB/s of both directions in pieces of 1 MiB, 95 in pieces of 4; and
every piece costs the host a dozen calls, which a message of 16 MiB waits for in smaller ones (H200,
docs/log.md)."""
PROVEN_PIECE = 16 << 10
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

    def word(self, rank: int, which: int, reader: int) -> int:
        """A counter that `rank` posts for `reader`, for the device: of an owner, `ALL` or `TAKEN`;
        `ABORT`, which `rank` itself reads."""
        return self.on_device + ((rank * WORDS + which) * layout.WORLD + reader) * LINE

    def here(self, word: int) -> ctypes.c_uint64:
        """A counter as this process sees it."""
        return ctypes.c_uint64.from_address(word + self.base - self.on_device)

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
    type: int
    bounds: tuple[tuple[int, int], ...]
    pieces: tuple[tuple[int, int], ...]

    def of(self, part: int, index: int) -> tuple[int, int, int]:
        """Of a piece of a part: begin in the part, begin in the message, size; bytes. A part that
        ends before has nothing of it."""
        (start, stop), (begin, end) = self.bounds[part], self.pieces[index]
        a, b = min(stop, start + begin), min(stop, start + end)
        return begin * self.width, a * self.width, (b - a) * self.width


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
        self.down, self.up, self.sums, self.posts, self.waits = (
            torch.cuda.Stream(device, priority=_FIRST)  # type: ignore[no-untyped-call]
            for _ in range(5)
        )
        self._record = torch.zeros(1024, dtype=torch.uint8).pin_memory()
        self._scratch = torch.empty(
            self.world * staging.part_bytes, dtype=torch.uint8, device=f"cuda:{device}"
        )
        self._open = threading.Lock()  # held while the staging memory is looked at from a thread
        self._closed = False
        self.piece_bytes = 0  # by size
        self._events: list[torch.cuda.Event] = []
        self._marked = 0
        self._posted = [0] * WORDS
        self._seen = [[0] * WORDS for _ in range(self.world)]
        for seen in self._seen:
            seen[TAKEN] = -1  # before the first call nothing is to be taken
        self._load(layout.TYPES["bfloat16"])
        self._watch = Watch(self) if self.by_streams else None

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
        main, self._marked = torch.cuda.current_stream(self.index), 0
        begun = self._mark(main)
        for stream in (self.down, self.up, self.sums, self.waits):
            stream.wait_event(begun)
        for peer in self._others():
            self._expect(peer, TAKEN, self.down)
        moved = self._moved(request, given.data_ptr(), out.data_ptr())
        if request.op is Op.ALL_GATHER:
            self._keep(moved)
            self._in_turn(moved, self._send_own, self._take_others)
        elif request.op is Op.REDUCE_SCATTER:
            self._load(element_type(request))
            self._in_turn(moved, self._send_parts, self._sum_own)
        elif self.world == 2:
            self._load(element_type(request))
            self._in_turn(moved, self._send_all, self._sum_all)
        else:
            self._load(element_type(request))
            # A sum that goes down waits for peers: nothing that they wait for may stand behind it.
            self._in_turn(moved, self._send_parts, self._sum_to_all, ahead=len(moved.pieces))
            self._in_turn(moved, lambda moved, index: None, self._take_others)
        self._tell(TAKEN, self.up)
        for stream in (self.down, self.up, self.sums):
            main.wait_event(self._mark(stream))
        return out

    def _moved(self, request: Request, given: int, out: int) -> _Moved:
        """Where `request` moves what. A sum of all has parts of whole packs, between two ranks one
        for both."""
        width, world, count = ELEMENT_BYTES[request.dtype], self.world, request.count
        bounds = tuple(shard(count, world, p) for p in range(world))
        if request.op is Op.ALL_REDUCE:
            share = -(-count // (world * 8)) * 8
            bounds = tuple(
                (min(count, p * share), min(count, (p + 1) * share)) for p in range(world)
            )
            if world == 2:
                bounds = ((0, count),) * world
        begin = bounds[self.rank][0]
        own_given, own_out = given + begin * width, out + begin * width
        if request.op is Op.ALL_GATHER:
            own_given = given
        elif request.op is Op.REDUCE_SCATTER:
            own_out = out
        share = max(end - begin for begin, end in bounds)
        least, most = (
            (self.piece_bytes or each) // width // 8 * 8 for each in (LEAST_PIECE, MOST_PIECE)
        )
        pieces = tuple(ramp(share, least, most))
        kind = element_type(request)
        return _Moved(given, out, own_given, own_out, width, kind, bounds, pieces)

    def _others(self) -> list[int]:
        """The peers, the next one first."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _in_turn(
        self,
        moved: _Moved,
        send: Callable[[_Moved, int], None],
        take: Callable[[_Moved, int], object],
        ahead: int = 1,
    ) -> None:
        """Enqueue sends, and `ahead` pieces behind them what is taken: neither way waits long for
        the host."""
        count = len(moved.pieces)
        for index in range(count + ahead):
            if index < count:
                send(moved, index)
            if index >= ahead:
                take(moved, index - ahead)

    def _keep(self, moved: _Moved) -> None:
        """This rank's rows to their place in its own result."""
        begin, end = moved.bounds[self.rank]
        if end > begin:
            size = (end - begin) * moved.width
            driver.copy_across(moved.own_out, moved.own_given, size, self.sums.cuda_stream)

    def _send_own(self, moved: _Moved, index: int) -> None:
        """A piece of this rank's rows, to all."""
        at, _, size = moved.of(self.rank, index)
        self._send(self.staging.part(self.rank, self.rank) + at, moved.own_given + at, size, ALL)

    def _send_parts(self, moved: _Moved, index: int) -> None:
        """A piece of what is given, to the owner of each part."""
        for p in self._others():
            at, start, size = moved.of(p, index)
            self._send(self.staging.part(self.rank, p) + at, moved.given + start, size, p)

    def _send_all(self, moved: _Moved, index: int) -> None:
        """A piece of all that is given, in this rank's whole room."""
        at, _, size = moved.of(self.rank, index)
        self._send(self.staging.part(self.rank, 0) + at, moved.given + at, size, ALL)
        if moved.given == moved.out:  # a sum goes where this is read
            self.sums.wait_event(self._mark(self.down))

    def _take_others(self, moved: _Moved, index: int) -> None:
        """What peers sent to all, into its place."""
        for p in self._others():
            at, start, size = moved.of(p, index)
            self._fetch(p, ALL, moved.out + start, self.staging.part(p, p) + at, size)

    def _sum_own(self, moved: _Moved, index: int) -> tuple[int, int]:
        """The sum of a piece of this rank's part; where in the part it lies, and its size."""
        at, _, size = moved.of(self.rank, index)
        room = self.staging.part_bytes
        sources = [self._scratch.data_ptr() + q * room + at for q in range(self.world)]
        sources[self.rank] = moved.own_given + at
        for q in self._others():
            self._fetch(q, self.rank, sources[q], self.staging.part(q, self.rank) + at, size)
        self._sum(moved, sources, moved.own_out + at, size)
        return at, size

    def _sum_to_all(self, moved: _Moved, index: int) -> None:
        """The same, and the sum goes to all."""
        at, size = self._sum_own(moved, index)
        self.down.wait_event(self._mark(self.sums))
        self._send(self.staging.part(self.rank, self.rank) + at, moved.own_out + at, size, ALL)

    def _sum_all(self, moved: _Moved, index: int) -> None:
        """The sum of a piece of two whole messages."""
        at, _, size = moved.of(self.rank, index)
        peer = 1 - self.rank
        came = self._scratch.data_ptr() + at
        self._fetch(peer, ALL, came, self.staging.part(peer, 0) + at, size)
        self._sum(moved, [moved.given + at, came], moved.out + at, size)  # of two, in any order

    def _send(self, to: int, start: int, size: int, which: int) -> None:
        """Bytes down, and `which` told that they are there."""
        if size:
            driver.copy_down(to, start, size, self.down.cuda_stream)
        self._tell(which, self.down)

    def _fetch(self, peer: int, which: int, to: int, start: int, size: int) -> None:
        """Bytes up, once `peer` has told `which` of them."""
        self._expect(peer, which, self.up)
        if size:
            driver.copy_up(to, start, size, self.up.cuda_stream)

    def _sum(self, moved: _Moved, sources: Sequence[int], to: int, size: int) -> None:
        """Of what has been fetched, in rank order."""
        if size == 0:
            return
        self.sums.wait_event(self._mark(self.up))
        width = moved.width
        call = Call(world=self.world, type=moved.type, width=width, unit=16 // width, output=to)
        call.slab[: self.world] = sources
        call.in_len[0] = size // width
        self._add(_ADD_BLOCKS, 512, self.sums.cuda_stream, [call])

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """What `stream` holds by now. Events are used again by the next call: who waits for one
        waits for what it was when that was enqueued."""
        if self._marked == len(self._events):
            self._events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        event = self._events[self._marked]
        self._marked += 1
        event.record(stream)
        return event

    def _tell(self, which: int, stream: torch.cuda.Stream) -> None:
        """Count `which` up for all who read it, behind what `stream` holds."""
        self._posted[which] += 1
        value, posts = self._posted[which], self.posts.cuda_stream
        self.posts.wait_event(self._mark(stream))
        for reader in self._others() if which in (ALL, TAKEN) else [which]:
            word = self.staging.word(self.rank, which, reader)
            if self.by_streams:
                driver.write_value(word, value, posts)
            else:
                self._post(1, 1, posts, [driver.u64(word), driver.u64(value)])

    def _expect(self, peer: int, which: int, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait until `peer` has counted on."""
        self._seen[peer][which] += 1
        word, value = self.staging.word(peer, which, self.rank), self._seen[peer][which]
        if self.by_streams:
            driver.await_value(word, value, self.waits.cuda_stream)
        else:
            abort = self.staging.word(self.rank, ABORT, self.rank)
            values = (word, value, abort, self._record.data_ptr(), int(self.budget_s * 1e9), peer)
            self._await(1, 1, self.waits.cuda_stream, [driver.u64(each) for each in values])
        stream.wait_event(self._mark(self.waits))

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
            for peer in self._others()
            for which, expected in enumerate(self._seen[peer])
            if expected > (found := self._counter(peer, which).value)
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


def ramp(count: int, least: int, most: int) -> Iterator[tuple[int, int]]:
    """`count` elements cut into pieces, begin and end of each: from `least` on twice the one
    before, `most` at most, and towards the end half of what is left; one empty piece for none."""
    begin, grown = 0, least
    while begin < count or begin == 0:
        size = min(most, grown, max(least, (count - begin) // 16 * 8))
        yield begin, min(count, begin + size)
        begin, grown = begin + size, 2 * grown
