"""A request cut into calls that fit a slot: who sends which elements to whom, for one rank.

Pure, and the same on all ranks but for the rank itself. Cutting changes no bit of a result: sums
are per element, in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from metainfer.comm.layout import BYTES, TYPES, Kind
from metainfer.comm.request import ELEMENT_BYTES, REDUCIBLE, Op, Request, shard
from metainfer.core.verdict import Verdict, require

PACK = 16
"""Bytes that stay in one block and, where addresses allow, move as one."""
ALGORITHMS = {
    Op.ALL_REDUCE: ("one_shot", "two_shot"),
    Op.REDUCE_SCATTER: ("direct",),
    Op.ALL_GATHER: ("direct",),
    Op.BROADCAST: ("direct",),
    Op.BARRIER: ("direct",),
    Op.ALL_TO_ALL: ("direct",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """What a transport gives: payload bytes of a slot, and whether the owner's one slot is read by
    all (`shared`) or each peer has a slot to write."""

    bytes: int
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The variable part of one call, in elements; `out_shift` moves the base of the output (and of
    residual and normed rows). Lists are per peer."""

    kind: Kind
    same: bool
    stride: int = 0  # bytes
    second: int = 0  # bytes
    unit: int = 1
    out_shift: int = 0
    in_begin: tuple[int, ...] = ()
    in_len: tuple[int, ...] = ()
    out_begin: tuple[int, ...] = ()
    out_len: tuple[int, ...] = field(default=())


def fits(request: Request, slots: Slots, algorithm: str) -> Verdict:
    """Whether one unit (a row, under an epilogue) fits what a call can carry."""
    able = algorithm in ALGORITHMS[request.op]
    verdict = require(able, "algorithm", f"{request.op} has no {algorithm}")
    if not able or request.epilogue is None:
        return verdict
    row = request.epilogue.hidden * ELEMENT_BYTES[request.dtype]
    room = _room(request, slots, algorithm)
    return verdict & require(
        row <= room, "slot", f"a row of {row} B exceeds the {room} B of a part"
    )


def element_type(request: Request) -> int:
    """The type code that C sums in."""
    summed = request.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER) and request.dtype in REDUCIBLE
    return TYPES[request.dtype] if summed else BYTES


def cut(request: Request, algorithm: str, rank: int, slots: Slots) -> Iterator[Piece]:
    """The calls of one rank, at least one: an empty message still meets."""
    if request.op is Op.ALL_REDUCE:
        cutter = _one_shot if algorithm == "one_shot" else _two_shot
        return cutter(request, rank, slots)
    if request.op is Op.REDUCE_SCATTER:
        return _reduce_scatter(request, rank, slots)
    if request.op is Op.ALL_GATHER:
        return _all_gather(request, rank, slots)
    if request.op is Op.ALL_TO_ALL:
        return _all_to_all(request, slots)
    return _broadcast(request, rank, slots)


def unit_of(request: Request) -> int:
    """Elements that stay in one block: whole rows under an epilogue, else a pack."""
    if request.epilogue is not None:
        return request.epilogue.hidden
    return max(1, PACK // ELEMENT_BYTES[request.dtype])


def _room(request: Request, slots: Slots, algorithm: str) -> int:
    """Bytes of one peer's part in a slot."""
    half = slots.bytes // 2 if algorithm == "two_shot" else slots.bytes
    parted = algorithm == "two_shot" or request.op in (Op.REDUCE_SCATTER, Op.ALL_TO_ALL)
    room = half // request.world if slots.shared and parted else half
    return room // PACK * PACK


def _capacity(request: Request, slots: Slots, algorithm: str = "direct") -> int:
    unit = unit_of(request)
    return _room(request, slots, algorithm) // (unit * ELEMENT_BYTES[request.dtype]) * unit


def _steps(count: int, capacity: int) -> Iterator[tuple[int, int]]:
    """Begin and length of each piece of `count` elements; one empty piece for none."""
    if count == 0:
        yield 0, 0
    for begin in range(0, count, capacity):
        yield begin, min(capacity, count - begin)


def _one_shot(request: Request, rank: int, slots: Slots) -> Iterator[Piece]:
    n = request.world
    for begin, length in _steps(request.count, _capacity(request, slots, "one_shot")):
        yield Piece(
            kind=Kind.SUM_ALL,
            same=True,
            unit=unit_of(request),
            out_shift=begin,
            in_begin=(begin,) * n,
            in_len=(length,) * n,
            out_begin=(0,) * n,
            out_len=(0,) * n,
        )


def _two_shot(request: Request, rank: int, slots: Slots) -> Iterator[Piece]:
    n, unit = request.world, unit_of(request)
    width = ELEMENT_BYTES[request.dtype]
    for begin, length in _steps(request.count, n * _capacity(request, slots, "two_shot")):
        part = -(-length // (n * unit)) * unit
        starts = tuple(begin + min(length, p * part) for p in range(n))
        lengths = tuple(min(length, (p + 1) * part) - min(length, p * part) for p in range(n))
        yield Piece(
            kind=Kind.SUM_GATHER,
            same=False,
            stride=-(-part * width // PACK) * PACK,
            second=slots.bytes // 2 // PACK * PACK,
            unit=unit,
            in_begin=starts,
            in_len=lengths,
            out_begin=starts,
            out_len=lengths,
        )


def _parts(request: Request) -> tuple[tuple[int, int], ...]:
    return tuple(shard(request.count, request.world, p) for p in range(request.world))


def _part_of(bounds: tuple[int, int], begin: int, capacity: int) -> tuple[int, int]:
    """Where a piece that begins at `begin` of a part lies, and its length there."""
    start, end = bounds
    return start + begin, max(0, min(capacity, end - start - begin))


def _reduce_scatter(request: Request, rank: int, slots: Slots) -> Iterator[Piece]:
    n, width = request.world, ELEMENT_BYTES[request.dtype]
    parts, capacity = _parts(request), _capacity(request, slots)
    for begin, _ in _steps(parts[0][1], capacity):
        placed = [_part_of(bounds, begin, capacity) for bounds in parts]
        lengths = tuple(length for _, length in placed)
        yield Piece(
            kind=Kind.SUM_PART,
            same=False,
            stride=-(-max(lengths) * width // PACK) * PACK,
            unit=unit_of(request),
            out_shift=begin,
            in_begin=tuple(start for start, _ in placed),
            in_len=lengths,
            out_begin=(0,) * n,
            out_len=(0,) * n,
        )


def _all_gather(request: Request, rank: int, slots: Slots) -> Iterator[Piece]:
    n, parts, capacity = request.world, _parts(request), _capacity(request, slots)
    for begin, _ in _steps(parts[0][1], capacity):
        placed = [_part_of(bounds, begin, capacity) for bounds in parts]
        yield Piece(
            kind=Kind.COPY,
            same=True,
            unit=unit_of(request),
            in_begin=(begin,) * n,
            in_len=(placed[rank][1],) * n,
            out_begin=tuple(start for start, _ in placed),
            out_len=tuple(length for _, length in placed),
        )


def _all_to_all(request: Request, slots: Slots) -> Iterator[Piece]:
    n, width = request.world, ELEMENT_BYTES[request.dtype]
    block = request.count // n
    for begin, length in _steps(block, _capacity(request, slots)):
        starts = tuple(p * block + begin for p in range(n))
        yield Piece(
            kind=Kind.COPY,
            same=False,
            stride=-(-length * width // PACK) * PACK,
            unit=unit_of(request),
            in_begin=starts,
            in_len=(length,) * n,
            out_begin=starts,
            out_len=(length,) * n,
        )


def _broadcast(request: Request, rank: int, slots: Slots) -> Iterator[Piece]:
    """A barrier is the broadcast of nothing."""
    n, root = request.world, request.root
    for begin, length in _steps(request.count, _capacity(request, slots)):
        yield Piece(
            kind=Kind.COPY if request.count else Kind.NOTHING,
            same=True,
            unit=unit_of(request),
            in_begin=(begin,) * n,
            in_len=(length if rank == root else 0,) * n,
            out_begin=(begin,) * n,
            out_len=tuple(length if p == root else 0 for p in range(n)),
        )
