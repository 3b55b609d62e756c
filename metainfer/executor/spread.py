"""A chunk's rows shared by ranks: the host's side, from a step plan's runs to index tables.

All runs of a segment, of every KV domain, stand one after the other; rank r computes the rows from
``r * m`` on, `m` of them, the last ones padded. Consecutive rows: requests and compressed windows
are cut at a border of ranks only, so what crosses borders is little. Later rows see more keys than
earlier ones, which matters while a chunk is long against what is cached before it; matrices, the
larger part of a chunk's work, are shared evenly in any order.

Who keeps a request: the rank of its domain; where a domain has several ranks that each keep some
heads, every one, its own part of the model; where each keeps all of it, every one. Of groups that
are dealt over ranks (`GroupSpec.shards`) each keeps its part, and a chunk sees a copy of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from metainfer.core.errors import InternalError
from metainfer.core.step import PENDING, Segment, TokenRun
from metainfer.executor.slots import SlotTable
from metainfer.executor.transfer import to_device
from metainfer.kv.book.spec import GroupKind, GroupSpec
from metainfer.models.common.spread import GroupSpread, Loan, Past

Ints = npt.NDArray[np.int64]
NONE = np.zeros(0, np.int64)


class Keeping(StrEnum):
    """Where the cache of a request lies, among the ranks that share rows of its prompt."""

    DOMAINS = "domains"  # with the rank of its domain
    HEADS = "heads"  # with every rank, its own heads
    EVERYWHERE = "everywhere"  # with every rank, all of it


@dataclass(frozen=True, slots=True)
class Run:
    """`keeper`: the domain that it belongs to. `own`: this rank has its page table."""

    keeper: int
    own: bool
    run: TokenRun

    @property
    def start(self) -> int:
        return self.run.start

    @property
    def end(self) -> int:
        return self.run.end


class Rows:
    """Who computes which rows of a segment. `rank`: this one of `ranks`; `domain`: its own."""

    def __init__(self, segment: Segment, rank: int, ranks: int, domain: int) -> None:
        self.rank, self.ranks, self.domains = rank, ranks, len(segment.ranks)
        self.runs = [
            Run(keeper, keeper == domain, run)
            for keeper, listed in enumerate(segment.ranks)
            for run in listed.runs
        ]
        lengths = np.array([len(each.run.tokens) for each in self.runs], np.int64)
        self.starts = np.zeros(len(self.runs) + 1, np.int64)  # first row of each run
        np.cumsum(lengths, out=self.starts[1:])
        self.total = int(self.starts[-1])
        self.share = max(1, -(-self.total // ranks))  # m
        self.run_of = np.repeat(np.arange(len(self.runs)), lengths)  # [T]
        first = np.array([each.start for each in self.runs], np.int64)
        within = np.arange(self.total) - np.repeat(self.starts[:-1], lengths)
        self.positions: Ints = np.repeat(first, lengths) + within  # [T]
        self.begin, self.end = self.span(rank)

    def span(self, rank: int) -> tuple[int, int]:
        """Rows of a rank, without padding."""
        return min(rank * self.share, self.total), min((rank + 1) * self.share, self.total)

    def pieces(self) -> range:
        """Runs that this rank computes rows of."""
        if self.begin == self.end:
            return range(0)
        return range(int(self.run_of[self.begin]), int(self.run_of[self.end - 1]) + 1)

    def ids(self) -> Ints:
        tokens = [token for each in self.runs for token in each.run.tokens]
        if PENDING in tokens:
            raise InternalError("a chunk that ranks share has a token that only one of them knows")
        return self.padded(np.array(tokens[self.begin : self.end], np.int64), 0)

    def padded(self, rows: Ints, fill: int) -> Ints:
        """Own rows, up to the same number on every rank."""
        return np.concatenate((rows, np.full(self.share - len(rows), fill, np.int64)))

    def told(self, known: Ints, every: Callable[[Ints], Ints]) -> Ints:
        """A number of each run [runs], of which this rank has `known` those of its domain; `every`:
        what each rank knows, one after the other, where domains are several."""
        if self.domains == 1:
            return known
        keepers = [each.keeper for each in self.runs]
        found: Ints = every(known).reshape(-1, len(known))[keepers, np.arange(len(known))]
        return found

    def given(self, rows: Ints) -> tuple[Ints, Ints]:
        """What ranks give of the `rows` (rising) that all are to have: this rank's own, padded with
        its first row to the most of any, as numbers within its rows; and the place of each of
        `rows` among what all gave."""
        owner = rows // self.share
        counts = np.bincount(owner, minlength=self.ranks)
        most = int(counts.max(initial=0))
        before = np.cumsum(counts) - counts
        places = owner * most + np.arange(len(rows)) - before[owner]
        mine = rows[owner == self.rank] - self.begin
        return np.concatenate((mine, np.zeros(most - len(mine), np.int64))), places


@dataclass(slots=True)
class _Tables:
    """One group's exchanges, before it is known which part of the model keeps what. `loans`:
    (keeper, slots in its cache where this rank is it, slots in the copies); `past`: see `Past`."""

    lines: int
    mine: Ints
    copy_from: Ints
    copy_to: Ints
    home_from: Ints
    home_to: Ints
    loans: list[tuple[int, Ints, Ints]]
    past: tuple[Ints, Ints, Ints] | None = None

    def of_part(self, part: int, rank: int, keeping: Keeping, device: torch.device) -> GroupSpread:
        """The same on the device. Where ranks keep heads, part i is kept by rank i."""
        heads = keeping is Keeping.HEADS
        stays = not heads or part == rank
        loans = tuple(
            Loan(part if heads else keeper, to_device(slots, device), to_device(to, device))
            for keeper, slots, to in self.loans
        )

        def move(array: Ints) -> torch.Tensor:
            return to_device(array, device)

        return GroupSpread(
            self.lines,
            loans,
            move(self.mine),
            move(self.copy_from),
            move(self.copy_to),
            move(self.home_from if stays else NONE),
            move(self.home_to if stays else NONE),
            None if self.past is None else Past(*map(move, self.past)),
        )


def tables(
    rows: Rows, groups: Sequence[GroupSpec], slots: SlotTable, keeping: Keeping
) -> list[tuple[npt.NDArray[np.int32] | None, Ints, _Tables]]:
    """Of every group: own pieces' page table (None for raw rows), where own rows write (of raw rows
    the line of each piece), and what is exchanged."""
    return [
        _raw(rows, group, keeping)
        if group.kind is GroupKind.STATE
        else _paged(rows, group, pages, keeping)
        for group, pages in zip(groups, slots.page_tables, strict=True)
    ]


def _paged(
    rows: Rows, group: GroupSpec, pages: npt.NDArray[np.int32], keeping: Keeping
) -> tuple[npt.NDArray[np.int32], Ints, _Tables]:
    size, ratio = group.page_tokens, group.tokens_per_entry
    dealt = group.shards > 1
    copied = dealt or keeping is not Keeping.EVERYWHERE
    kept = np.full((len(rows.runs), pages.shape[1]), -1, np.int64)
    for number, each in enumerate(rows.runs):
        if each.own:
            kept[number] = pages[each.run.slot]
    table, lines = _copied(rows, group, pages.shape[1]) if copied else (kept, 0)

    def at(where: Ints, of: Ints, positions: Ints) -> Ints:
        """Slots of the entries that close at `positions` of runs `of`, -1 where no page is."""
        page = where[of, positions // size]
        return np.where(page < 0, -1, page * group.page_entries + positions % size // ratio)

    closing = np.flatnonzero((rows.positions + 1) % ratio == 0)
    of, positions = rows.run_of[closing], rows.positions[closing]
    new, stays = at(table, of, positions), at(kept, of, positions)
    if dealt:
        stays = np.where(_owner(group, positions) == group.part, _own_slots(group, stays), -1)
    writes = np.full(rows.total, -1, np.int64)
    writes[closing] = new
    own = rows.padded(writes[rows.begin : rows.end], -1)
    mine, places = rows.given(closing)
    there, home = new >= 0, (stays >= 0) & copied
    loans = []
    keepers = sorted({each.keeper for each in rows.runs}) if copied and not dealt else []
    for keeper in keepers:
        earlier = [_past(group, one.start) if one.keeper == keeper else NONE for one in rows.runs]
        whose = np.repeat(np.arange(len(earlier)), [len(found) for found in earlier])
        before = np.concatenate(earlier)
        if len(before):
            loaned = np.maximum(at(kept, whose, before), 0)
            loans.append((keeper, loaned, at(table, whose, before)))
    longest = max(each.end for each in rows.runs)
    pieces = rows.pieces()
    seen = table[pieces.start : pieces.stop, : group.pages_for(longest)].astype(np.int32)
    exchanged = _Tables(
        lines=lines,
        mine=np.maximum(own[mine], 0),
        copy_from=places[there],
        copy_to=new[there],
        home_from=new[home] if dealt else places[home],
        home_to=stays[home],
        loans=loans,
        past=_parts_before(rows, group, at, kept, table) if dealt else None,
    )
    return np.ascontiguousarray(seen), own, exchanged


def nothing(group: GroupSpec) -> _Tables:
    """Of a segment without any run."""
    dealt = group.shards > 1
    return _Tables(int(dealt), *(NONE,) * 5, [], (NONE,) * 3 if dealt else None)


def _owner(group: GroupSpec, positions: Ints) -> Ints:
    """Which rank holds the entries that close at `positions`."""
    found: Ints = positions % group.page_tokens // group.tokens_per_entry % group.shards
    return found


def _own_slots(group: GroupSpec, slots: Ints) -> Ints:
    """Slots of whole pages as the rank that holds each numbers its own."""
    page, entry = np.divmod(slots, group.page_entries)
    found: Ints = page * group.rank_entries + entry // group.shards
    return found


def _parts_before(
    rows: Rows,
    group: GroupSpec,
    at: Callable[[Ints, Ints, Ints], Ints],
    kept: Ints,
    table: Ints,
) -> tuple[Ints, Ints, Ints]:
    """What lies before the runs in the ranks' parts, as in `Past`."""
    earlier = [_past(group, each.start) for each in rows.runs]
    whose = np.repeat(np.arange(len(earlier)), [len(found) for found in earlier])
    positions = np.concatenate(earlier)
    owner, slots = _owner(group, positions), _own_slots(group, at(kept, whose, positions))
    counts = np.bincount(owner, minlength=group.shards)
    most = int(counts.max(initial=0))
    order = np.argsort(owner, kind="stable")
    source = np.empty(len(owner), np.int64)
    before = np.cumsum(counts) - counts
    source[order] = owner[order] * most + np.arange(len(owner)) - before[owner[order]]
    mine = slots[owner == group.part]
    padding = np.zeros(most - len(mine), np.int64)
    return np.concatenate((mine, padding)), source, at(table, whose, positions)


def _copied(rows: Rows, group: GroupSpec, width: int) -> tuple[Ints, int]:
    """Page tables [runs, width] of the copies, and their pages in all."""
    table, lines = np.full((len(rows.runs), width), -1, np.int64), 0
    for number, each in enumerate(rows.runs):
        low = max(0, each.start - group.window + 1) if group.window else 0
        span = np.arange(low // group.page_tokens, group.pages_for(each.end))
        table[number, span] = lines + np.arange(len(span))
        lines += len(span)
    return table, lines


def _past(group: GroupSpec, start: int) -> Ints:
    """Closing positions of the entries that rows from `start` on may read."""
    low = max(0, start - group.window + 1) if group.window else 0
    ratio = group.tokens_per_entry
    found: Ints = np.arange(low // ratio, start // ratio) * ratio + ratio - 1
    return found


def _raw(rows: Rows, group: GroupSpec, keeping: Keeping) -> tuple[None, Ints, _Tables]:
    ring, copied = group.rows, keeping is not Keeping.EVERYWHERE
    line = [n if copied else each.run.slot for n, each in enumerate(rows.runs)]
    loans, edges, halo = [], np.zeros(rows.total, np.bool_), NONE
    for number, each in enumerate(rows.runs):
        begin, end = rows.starts[number : number + 2].tolist()
        first = each.start  # of the positions that some rank reads before its own
        for rank in range(begin // rows.share, -(-end // rows.share)):
            row = max(begin, rank * rows.share)
            position = each.start + row - begin
            low = max(0, position - _open_rows(group, position))
            first = min(first, low)
            inside = np.arange(max(low, each.start), position) - each.start + begin
            edges[inside] = True
            if rank == rows.rank:
                halo = inside if len(inside) else halo
        edges[max(begin, end - ring) : end] = True
        if copied and first < each.start:
            before = np.arange(first, each.start) % ring
            there = each.run.slot * ring + before if each.own else np.zeros_like(before)
            loans.append((each.keeper, there, number * ring + before))
    given = np.flatnonzero(edges)
    mine, places = rows.given(given)
    place_of = np.zeros(rows.total, np.int64)
    place_of[given] = places

    def at(of: Ints, lines: Sequence[int]) -> Ints:
        """Slots of the raw rows `of`."""
        return np.array(lines, np.int64)[rows.run_of[of]] * ring + rows.positions[of] % ring

    ends = [
        np.arange(max(rows.starts[n], rows.starts[n + 1] - ring), rows.starts[n + 1])
        for n, each in enumerate(rows.runs)
        if each.own
    ]
    last = np.concatenate(ends) if ends else NONE
    exchanged = _Tables(
        lines=len(rows.runs) if copied else 0,
        mine=mine,
        copy_from=place_of[halo],
        copy_to=at(halo, line),
        home_from=place_of[last],
        home_to=at(last, [each.run.slot for each in rows.runs]),
        loans=loans,
    )
    return None, np.array([line[n] for n in rows.pieces()], np.int64), exchanged


def _open_rows(group: GroupSpec, position: int) -> int:
    """Raw rows before `position` that windows closing from there on may hold."""
    if group.clean_tokens:
        return position % group.clean_tokens
    return group.rows - group.ring_tokens
