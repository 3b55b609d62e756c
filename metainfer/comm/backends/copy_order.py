"""What one rank puts into its streams for a long call by copy engines, and in which order.

A reduce-scatter sends parts down to host memory; their owner takes the others' up and adds in rank
order (one rounding). A gather sends a rank's rows down once, and everyone takes them up. An
all-reduce is one behind the other, piece by piece; between two ranks, where that carries no byte
less, everyone sends all of it and sums all of it.

Down and up have a stream each that carries copies alone, so that both directions of the link work
at once and an engine goes from copy to copy; sums have a third. Between ranks a counter in host
memory is written behind each copy and awaited before one, on two more streams: by themselves where
a device does that, else by one-thread kernels. One staging memory is enough: a rank writes into it
only once every peer has taken all of the call before, which copy streams await and write
themselves, for that stands before and behind all copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from metainfer.comm import layout
from metainfer.comm.enqueue import NOTHING, Behind, Kind, Program, Steps
from metainfer.comm.layout import Call
from metainfer.comm.pieces import element_type
from metainfer.comm.request import ELEMENT_BYTES, Op, Request, shard
from metainfer.comm.rooms import COUNTERS, staging_bytes

LINE = 64
ALL, TAKEN, ABORT = layout.WORLD, layout.WORLD + 1, layout.WORLD + 2
"""What a rank posts beside what it sends to each owner: what it sends to all, calls of which it has
taken everything, and its abort word."""
WORDS = layout.WORLD + 3
GIVEN, OUT, STREAM, BUDGET = range(NOTHING + 1, NOTHING + 5)
"""Bases of a call: its operands, the stream that it stands in, nanoseconds that kernels wait."""
POSTED = BUDGET + 1
"""And the counters: what this rank has posted, then what it has seen of every rank."""
BASES = POSTED + WORDS * (layout.WORLD + 1)
SETUP_S, ALONE, BOTH = 4.2e-6, 55e9, 100e9
"""A copy beside its bytes, and bytes a second in one direction alone and in both together, of copy
engines (H200, docs/log.md)."""
FIRST_CUT = int(SETUP_S / (2 / ALONE - 2 / BOTH))
"""Bytes. What one piece costs more than another costs less: its setup, and that the first one's way
down and the last one's way up have their direction alone. Of S bytes that is least in pieces of
sqrt(S * FIRST_CUT), 2 MiB of 16. They are equal: up follows down, so the largest one is waited for
wherever it stands."""
_ADD_BLOCKS, _ADD_THREADS = 32, 512


def seen(peer: int, which: int) -> int:
    """The base of what this rank expects of a counter of `peer` by now."""
    return POSTED + WORDS * (peer + 1) + which


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
        return staging_bytes(world, part_bytes)

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
class Cut:
    """A call in pieces. `own_given`, `own_out`: where this rank's part begins in what it gives and
    in what it gets. `bounds`: parts, `pieces`: of every part, begin and end in elements."""

    own_given: Behind
    own_out: Behind
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


def cut(request: Request, rank: int, piece_bytes: int) -> Cut:
    """What `request` moves, in pieces of `piece_bytes`, by size where that is 0. A sum of all has
    parts of whole packs, between two ranks one for both."""
    width, world, count = ELEMENT_BYTES[request.dtype], request.world, request.count
    bounds = tuple(shard(count, world, p) for p in range(world))
    if request.op is Op.ALL_REDUCE:
        share = -(-count // (world * 8)) * 8
        bounds = tuple((min(count, p * share), min(count, (p + 1) * share)) for p in range(world))
        if world == 2:
            bounds = ((0, count),) * world
    begin = bounds[rank][0] * width
    own_given = Behind(GIVEN, 0 if request.op is Op.ALL_GATHER else begin)
    own_out = Behind(OUT, 0 if request.op is Op.REDUCE_SCATTER else begin)
    share = max(end - begin for begin, end in bounds)
    size = share * width
    count = -(-size // piece_bytes) if piece_bytes else round((size / FIRST_CUT) ** 0.5)
    pieces = tuple(even(share, max(1, count)))
    return Cut(own_given, own_out, width, element_type(request), bounds, pieces)


def even(count: int, pieces: int) -> Iterator[tuple[int, int]]:
    """`count` elements cut into `pieces` at most, begin and end of each: equal ones of whole packs,
    the last of what is left; one empty piece for none."""
    size = max(8, -(-count // (pieces * 8)) * 8)
    for begin in range(0, max(1, count), size):
        yield begin, min(count, begin + size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a rank's steps are made with: streams, its error record, scratch of
    ``world * part_bytes`` on the device, kernels (`add` by type code) and events, by handle or
    address. `by_streams`: they write and await counters themselves."""

    rank: int
    staging: Staging
    down: int
    up: int
    sums: int
    posts: int
    waits: int
    record: int
    scratch: int
    post: int
    wait: int
    add: Callable[[int], int]
    event: Callable[[int], int]
    by_streams: bool


class Order:
    """Writes down the steps of a call; `program` is all there is to ask of it.

    `in_place`: sums go where what is given is read.
    """

    def __init__(self, means: Means, request: Request, *, in_place: bool, piece_bytes: int) -> None:
        self._means, self._staging = means, means.staging
        self._rank, self._world = means.rank, means.staging.world
        self._in_place = in_place
        self._request, self._cut = request, cut(request, means.rank, piece_bytes)
        self._steps, self._marked = Steps(), 0

    def program(self) -> Program:
        """The call's steps, behind what its stream holds, which goes on behind them."""
        means, op = self._means, self._request.op
        begun = self._mark(Behind(STREAM))
        streams = [means.down, means.up, means.sums]
        # Kernels that wait have a budget from when they begin; a stream's waits have none, and are
        # mostly over by the time that a call begins.
        for stream in streams if means.by_streams else [*streams, means.waits]:
            self._steps.follow(stream, begun)
        for peer in self._others():
            self._await(peer, TAKEN, means.down)
        if op is Op.ALL_GATHER:
            self._keep()
            self._in_turn(self._send_own, self._take_others)
        elif op is Op.REDUCE_SCATTER:
            self._in_turn(self._send_parts, self._sum_own)
        elif self._world == 2:
            self._in_turn(self._send_all, self._sum_all)
        else:
            # A sum that goes down waits for peers: nothing that they wait for may stand behind it.
            self._in_turn(self._send_parts, self._sum_to_all, ahead=len(self._cut.pieces))
            self._in_turn(lambda index: None, self._take_others)
        self._post(TAKEN, means.up)
        for stream in streams:
            self._steps.follow(Behind(STREAM), self._mark(stream))
        return self._steps.written()

    def _others(self) -> list[int]:
        """The peers, the next one first."""
        return [(self._rank + step) % self._world for step in range(1, self._world)]

    def _in_turn(
        self, send: Callable[[int], None], take: Callable[[int], object], ahead: int = 1
    ) -> None:
        """Sends, and `ahead` pieces behind them what is taken: neither way waits long for the
        host."""
        count = len(self._cut.pieces)
        for index in range(count + ahead):
            if index < count:
                send(index)
            if index >= ahead:
                take(index - ahead)

    def _keep(self) -> None:
        """This rank's rows to their place in its own result."""
        begin, end = self._cut.bounds[self._rank]
        if end > begin:
            size = (end - begin) * self._cut.width
            to, start = self._cut.own_out, self._cut.own_given
            self._steps.copy(Kind.ACROSS, to, start, size, self._means.sums)

    def _send_own(self, index: int) -> None:
        """A piece of this rank's rows, to all."""
        at, _, size = self._cut.of(self._rank, index)
        to = self._staging.part(self._rank, self._rank) + at
        self._send(to, self._cut.own_given + at, size, ALL)

    def _send_parts(self, index: int) -> None:
        """A piece of what is given, to the owner of each part."""
        for p in self._others():
            at, start, size = self._cut.of(p, index)
            self._send(self._staging.part(self._rank, p) + at, Behind(GIVEN, start), size, p)

    def _send_all(self, index: int) -> None:
        """A piece of all that is given, in this rank's whole room."""
        at, _, size = self._cut.of(self._rank, index)
        self._send(self._staging.part(self._rank, 0) + at, Behind(GIVEN, at), size, ALL)
        if self._in_place:  # a sum goes where this is read
            self._steps.follow(self._means.sums, self._mark(self._means.down))

    def _take_others(self, index: int) -> None:
        """What peers sent to all, into its place."""
        for p in self._others():
            at, start, size = self._cut.of(p, index)
            self._fetch(p, ALL, Behind(OUT, start), self._staging.part(p, p) + at, size)

    def _sum_own(self, index: int) -> tuple[int, int]:
        """The sum of a piece of this rank's part; where in the part it lies, and its size."""
        at, _, size = self._cut.of(self._rank, index)
        room = self._staging.part_bytes
        sources: list[int | Behind] = [
            self._means.scratch + q * room + at for q in range(self._world)
        ]
        for q in self._others():
            start = self._staging.part(q, self._rank) + at
            self._fetch(q, self._rank, sources[q], start, size)
        sources[self._rank] = self._cut.own_given + at
        self._sum(sources, self._cut.own_out + at, size)
        return at, size

    def _sum_to_all(self, index: int) -> None:
        """The same, and the sum goes to all."""
        at, size = self._sum_own(index)
        self._steps.follow(self._means.down, self._mark(self._means.sums))
        to = self._staging.part(self._rank, self._rank) + at
        self._send(to, self._cut.own_out + at, size, ALL)

    def _sum_all(self, index: int) -> None:
        """The sum of a piece of two whole messages."""
        at, _, size = self._cut.of(self._rank, index)
        peer, came = 1 - self._rank, self._means.scratch + at
        self._fetch(peer, ALL, came, self._staging.part(peer, 0) + at, size)
        self._sum([Behind(GIVEN, at), came], Behind(OUT, at), size)  # of two, in any order

    def _send(self, to: int, start: Behind, size: int, which: int) -> None:
        """Bytes down, and `which` told that they are there."""
        if size:
            self._steps.copy(Kind.DOWN, to, start, size, self._means.down)
        self._tell(which, self._means.down)

    def _fetch(self, peer: int, which: int, to: int | Behind, start: int, size: int) -> None:
        """Bytes up, once `peer` has told `which` of them."""
        self._expect(peer, which, self._means.up)
        if size:
            self._steps.copy(Kind.UP, to, start, size, self._means.up)

    def _sum(self, sources: Sequence[int | Behind], to: Behind, size: int) -> None:
        """Of what has been fetched, in rank order."""
        if size == 0:
            return
        sums, width, kind = self._means.sums, self._cut.width, self._cut.type
        self._steps.follow(sums, self._mark(self._means.up))
        stripe = -(-size // (16 * _ADD_BLOCKS)) * 16 // width  # whole packs
        call = Call(world=self._world, type=kind, width=width, stripe=stripe)
        call.in_len[0] = size // width
        slabs = ctypes.addressof(call) + Call.slab.offset
        fields = {slabs + 8 * place: source for place, source in enumerate(sources)}
        fields[ctypes.addressof(call) + Call.output.offset] = to
        self._steps.launch(self._means.add(kind), _ADD_BLOCKS, _ADD_THREADS, sums, [call], fields)

    def _mark(self, stream: int | Behind) -> int:
        """An event: what `stream` holds by now. The next call uses it again: who waits for one
        waits for what it was when that was enqueued."""
        event = self._means.event(self._marked)
        self._marked += 1
        self._steps.record(event, stream)
        return event

    def _tell(self, which: int, stream: int) -> None:
        """Count `which` up behind what `stream` holds, which goes on with copies meanwhile."""
        self._steps.follow(self._means.posts, self._mark(stream))
        self._post(which, self._means.posts)

    def _post(self, which: int, stream: int) -> None:
        """Let `stream` count `which` up for all who read it."""
        value = self._steps.count(POSTED + which)
        for reader in self._others() if which in (ALL, TAKEN) else [which]:
            word = self._staging.word(self._rank, which, reader)
            if self._means.by_streams:
                self._steps.write(word, value, stream)
            else:
                self._steps.launch_words(self._means.post, stream, [word, value])

    def _expect(self, peer: int, which: int, stream: int) -> None:
        """Let `stream` go on behind what it holds once `peer` has counted on."""
        self._await(peer, which, self._means.waits)
        self._steps.follow(stream, self._mark(self._means.waits))

    def _await(self, peer: int, which: int, stream: int) -> None:
        """Let `stream` itself wait until `peer` has counted on."""
        value = self._steps.count(seen(peer, which))
        word = self._staging.word(peer, which, self._rank)
        if self._means.by_streams:
            self._steps.wait(word, value, stream)
        else:
            abort = self._staging.word(self._rank, ABORT, self._rank)
            record, budget = self._means.record, Behind(BUDGET)
            words: list[int | Behind] = [word, value, abort, record, budget, peer]
            self._steps.launch_words(self._means.wait, stream, words)
