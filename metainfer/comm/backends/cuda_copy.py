"""Large all-reduces without peer access: copy engines through pinned host memory, in pieces.

Two-shot on two copy streams per rank: parts go down to host memory, their owner takes the others'
up, adds in rank order (one rounding), sends the sum down, and everyone takes it up. Pieces let both
directions of the link work at once. Between ranks a counter in host memory is posted by a
one-thread kernel behind each copy and awaited by another.

One staging memory is enough: a rank overwrites its parts or sums only after parts of the next call
came from every peer (sums), or after every peer's sum of this call (parts), and a peer sends those
behind its own last read. Not for graphs: counters grow from call to call.
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
from metainfer.comm.request import ELEMENT_BYTES, Request
from metainfer.comm.segment import Segment

LINE = 128
WORDS = layout.WORLD + 2  # what a rank posts: to each owner, of its sums, and its abort word
COUNTERS = 16384
PIECES, LEAST_PIECE, MOST_PIECE = 8, 512 << 10, 4 << 20
_ADD_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class Staging:
    """Pinned host memory of a group: counters, then per rank ``part_bytes * (world + 1)``:
    what goes to each owner, and the sums. `base` is as this process sees it, `on_device`
    as the device does."""

    base: int
    on_device: int
    world: int
    part_bytes: int

    @classmethod
    def size(cls, world: int, part_bytes: int) -> int:
        return COUNTERS + world * (world + 1) * part_bytes

    def word(self, rank: int, which: int) -> int:
        """A counter that `rank` posts, for the device: 0 .. 7 for an owner, 8 for sums, 9 to
        abort."""
        return self.on_device + (rank * WORDS + which) * LINE

    def part(self, rank: int, owner: int) -> int:
        """Where `rank` leaves what belongs to `owner`; `owner` = world: its sums."""
        begin = self.base + COUNTERS
        return begin + (rank * (self.world + 1) + owner) * self.part_bytes


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
        self.down, self.up = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self._record = torch.zeros(1024, dtype=torch.uint8).pin_memory()
        self._scratch = torch.empty(
            self.world * staging.part_bytes, dtype=torch.uint8, device=f"cuda:{device}"
        )
        self.piece_bytes = 0  # by size
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._posted = [0] * WORDS
        self._seen = [[0] * WORDS for _ in range(self.world)]
        self._load(layout.TYPES["bfloat16"])

    def _load(self, type_code: int) -> None:
        loaded = module(Variant(self.world, type_code), self.index)
        self._post, self._await, self._add = (
            loaded.function(name) for name in ("mi_post", "mi_await", "mi_add")
        )

    def run(self, plan: CommPlan, given: Tensor, out: Tensor | None = None) -> Tensor:
        """All-reduce `given` behind what the current stream holds.

        Raises:
            CommError: an earlier call failed.
        """
        self.check()
        request = plan.request
        out = checked(request, self.rank, given, out, "cuda")
        width = ELEMENT_BYTES[request.dtype]
        self._load(element_type(request))
        main = torch.cuda.current_stream(self.index)
        self.down.wait_stream(main)
        self.up.wait_stream(main)
        share = -(-request.count // (self.world * 8)) * 8
        bounds = [
            (min(request.count, p * share), min(request.count, (p + 1) * share))
            for p in range(self.world)
        ]
        size = self.piece_bytes or min(MOST_PIECE, max(LEAST_PIECE, share * width // PIECES))
        pieces = _pieces(share, size // width // 8 * 8)
        while len(self._events) < len(pieces):
            came, added = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
            self._events.append((came, added))
        self._send_parts(given.data_ptr(), bounds, pieces, width)
        self._sum_own(given.data_ptr(), out.data_ptr(), bounds, pieces, width, request.dtype)
        self._take_sums(out.data_ptr(), bounds, pieces, width)
        main.wait_stream(self.down)
        main.wait_stream(self.up)
        return out

    def _send_parts(
        self,
        given: int,
        bounds: Sequence[tuple[int, int]],
        pieces: Sequence[tuple[int, int]],
        width: int,
    ) -> None:
        stream = self.down.cuda_stream
        for begin, end in pieces:
            for step in range(1, self.world):
                p = (self.rank + step) % self.world
                a, b = _clip(bounds[p], begin, end)
                if b > a:
                    to = self.staging.part(self.rank, p) + begin * width
                    driver.copy_down(to, given + a * width, (b - a) * width, stream)
                self._tell(p, stream)

    def _sum_own(
        self,
        given: int,
        out: int,
        bounds: Sequence[tuple[int, int]],
        pieces: Sequence[tuple[int, int]],
        width: int,
        dtype: str,
    ) -> None:
        main = torch.cuda.current_stream(self.index)
        up, down = self.up.cuda_stream, self.down.cuda_stream
        room = self.staging.part_bytes
        for (begin, end), (came, added) in zip(pieces, self._events, strict=False):
            a, b = _clip(bounds[self.rank], begin, end)
            sources = [0] * self.world
            for q in range(self.world):
                sources[q] = self._scratch.data_ptr() + q * room + begin * width
                if q == self.rank:
                    sources[q] = given + a * width
                    continue
                self._expect(q, self.rank, up)
                if b > a:
                    start = self.staging.part(q, self.rank) + begin * width
                    driver.copy_up(sources[q], start, (b - a) * width, up)
            came.record(self.up)
            main.wait_event(came)
            if b > a:
                self._sum(sources, out + a * width, b - a, width, dtype, main.cuda_stream)
            added.record(main)
            self.down.wait_event(added)
            if b > a:
                to = self.staging.part(self.rank, self.world) + begin * width
                driver.copy_down(to, out + a * width, (b - a) * width, down)
            self._tell(layout.WORLD, down)

    def _take_sums(
        self,
        out: int,
        bounds: Sequence[tuple[int, int]],
        pieces: Sequence[tuple[int, int]],
        width: int,
    ) -> None:
        stream = self.up.cuda_stream
        for begin, end in pieces:
            for step in range(1, self.world):
                p = (self.rank + step) % self.world
                a, b = _clip(bounds[p], begin, end)
                self._expect(p, layout.WORLD, stream)
                if b > a:
                    start = self.staging.part(p, self.world) + begin * width
                    driver.copy_up(out + a * width, start, (b - a) * width, stream)

    def _sum(
        self, sources: Sequence[int], to: int, count: int, width: int, dtype: str, stream: int
    ) -> None:
        call = Call(
            world=self.world, type=layout.TYPES[dtype], width=width, unit=16 // width, output=to
        )
        call.slab[: self.world] = sources
        call.in_len[0] = count
        self._add(_ADD_BLOCKS, 512, stream, [call])

    def _tell(self, which: int, stream: int) -> None:
        self._posted[which] += 1
        word = self.staging.word(self.rank, which)
        self._post(1, 1, stream, [driver.u64(word), driver.u64(self._posted[which])])

    def _expect(self, peer: int, which: int, stream: int) -> None:
        self._seen[peer][which] += 1
        values = (
            self.staging.word(peer, which),
            self._seen[peer][which],
            self.staging.word(self.rank, layout.WORLD + 1),
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
        word = self.staging.word(self.rank if rank is None else rank, layout.WORLD + 1)
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
            f"a copy-engine all_reduce failed on rank {self.rank}: it {what} rank {peer} "
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
