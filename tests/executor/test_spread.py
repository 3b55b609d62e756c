"""Rows of a chunk over ranks: whatever is cut where, every rank sees what it reads, and its keeper
has all of a request. Values are names: request and position; what nobody wrote is NaN."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from metainfer.comm.side import Done
from metainfer.core.step import Phase, RankTokens, Segment, TokenRun
from metainfer.executor.slots import SlotTable
from metainfer.executor.spread import Keeping, Rows, tables
from metainfer.kv.book.form import plain
from metainfer.kv.book.spec import GroupKind, GroupSpec
from metainfer.kv.store.entries import EntryPages, StateRows
from metainfer.kv.store.moving import lay, lift
from metainfer.models.common.spread import Spread

CPU = torch.device("cpu")
CONTEXT, PAGE, SLOTS, PAGES = 96, 16, 3, 40
NAN = float("nan")


@dataclass
class Meeting:
    """What threads, one a rank, lay side by side."""

    size: int
    parts: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts = [torch.empty(0)] * self.size
        self.gate = threading.Barrier(self.size, timeout=60)

    def peers(self, rank: int) -> Threads:
        return Threads(self, rank)


@dataclass
class Threads:
    meeting: Meeting
    rank: int

    @property
    def size(self) -> int:
        return self.meeting.size

    def _all(self, x: Tensor) -> list[Tensor]:
        self.meeting.parts[self.rank] = x.clone()
        self.meeting.gate.wait()
        found = list(self.meeting.parts)
        self.meeting.gate.wait()
        return found

    def rows(self, x: Tensor) -> Tensor:
        found = self._all(x)
        assert len({part.shape for part in found}) == 1, "ranks bring different numbers of rows"
        return torch.cat(found)

    def start_rows(self, x: Tensor) -> Done[Tensor]:
        return Done(self.rows(x))

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        found = self._all(x)
        assert found[root].shape == x.shape
        return found[root]

    sum = sum_rows = columns = None


GROUPS = {
    "paged": GroupSpec(
        index=0, name="kv", cache="kv", kind=GroupKind.PAGED, form=plain("latent@1", 1, "float64"),
        layers=(0,), page_tokens=PAGE, kernel_page_entries=PAGE,
    ),
    "compressed": GroupSpec(
        index=0, name="c", cache="c", kind=GroupKind.PAGED, form=plain("latent@1", 1, "float64"),
        layers=(0,), page_tokens=PAGE, kernel_page_entries=PAGE // 4, tokens_per_entry=4,
    ),
    "window": GroupSpec(
        index=0, name="w", cache="w", kind=GroupKind.WINDOW, form=plain("latent@1", 1, "float64"),
        layers=(0,), page_tokens=PAGE, kernel_page_entries=PAGE, window=20,
    ),
    "side by side": GroupSpec(
        index=0, name="r", cache="r", kind=GroupKind.STATE,
        form=plain("rows@1", 1, "float64", parts=2), layers=(0,), rows=8 + 3, ring_tokens=3,
        clean_tokens=8,
    ),
    "overlapping": GroupSpec(
        index=0, name="o", cache="o", kind=GroupKind.STATE,
        form=plain("rows@1", 1, "float64", parts=2), layers=(0,), rows=2 * 4 + 3, ring_tokens=3,
        snapshot_rows=4,
    ),
}  # fmt: skip


def name(keeper: int, slot: int, position: int) -> float:
    return float((keeper * SLOTS + slot) * 1000 + position)


class Rank:
    """One rank: its cache holds what came before the chunk, of the requests that it keeps."""

    def __init__(self, group: GroupSpec, segment: Segment, domain: int, everywhere: bool) -> None:
        self.group, self.domain = group, domain
        self.table = SlotTable((group,), SLOTS, CONTEXT, 10)
        pages = torch.full((PAGES, group.page_entries or 1, 1), NAN, dtype=torch.float64)
        self.cache: EntryPages | StateRows = EntryPages(0, pages, group.form, group.page_entries)
        if group.kind is GroupKind.STATE:
            lines = torch.full((SLOTS + 1, 2, group.rows, 1), NAN, dtype=torch.float64)
            self.cache = StateRows(0, lines)
        free = list(range(1, PAGES))
        for keeper, listed in enumerate(segment.ranks):
            for run in listed.runs if keeper == domain or everywhere else ():
                if group.kind is not GroupKind.STATE:
                    count = group.pages_for(run.end)
                    self.table.page_tables[0][run.slot, :count] = free[:count]
                    free = free[count:]
                self.write(keeper, run.slot, range(run.start))

    def slot_of(self, slot: int, position: int) -> int:
        group = self.group
        if group.kind is GroupKind.STATE:
            return slot * group.rows + position % group.rows
        page = int(self.table.page_tables[0][slot, position // PAGE])
        return page * group.page_entries + position % PAGE // group.tokens_per_entry

    def write(self, keeper: int, slot: int, positions: range) -> None:
        for position in positions:
            if (position + 1) % self.group.tokens_per_entry == 0:
                lay(self.cache, *one(self.slot_of(slot, position), name(keeper, slot, position)))

    def has(self, slot: int, position: int) -> float:
        return read(self.cache, self.slot_of(slot, position))


def one(slot: int, value: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([slot]), torch.full((1, 1), value, dtype=torch.float64)


def read(view: EntryPages | StateRows, slot: int) -> float:
    return float(lift(view, torch.tensor([slot])).flatten()[0])


def drawn(rng: random.Random, domains: int) -> Segment:
    """Chunks of every length, most of several ranks' rows, beginning anywhere."""
    ranks = []
    for _ in range(domains):
        slots = rng.sample(range(SLOTS), rng.choice((0, 1, 1, 2, 3)))
        runs = []
        for slot in slots:
            start, count = rng.choice((0, 0, rng.randrange(40))), rng.choice((2, 3, 9, 17, 40))
            runs.append(TokenRun(slot, start, (1,) * count, 1))
        ranks.append(RankTokens(tuple(runs)))
    if not any(rank.runs for rank in ranks):
        ranks[0] = RankTokens((TokenRun(0, 5, (1,) * 6, 1),))
    return Segment(Phase.CHUNK, "cp", tuple(ranks))


CASES = [
    (kind, keeping)
    for kind, group in GROUPS.items()
    for keeping in Keeping
    if keeping is not Keeping.HEADS or group.kind is not GroupKind.STATE  # raw rows have no heads
]


@pytest.mark.parametrize(("kind", "keeping"), CASES)
def test_every_rank_sees_what_it_reads(kind: str, keeping: Keeping, rng: random.Random) -> None:
    group = GROUPS[kind]
    for _ in range(25):
        size = rng.choice((2, 3, 4))
        domains = size if keeping is Keeping.DOMAINS else 1
        segment, meeting = drawn(rng, domains), Meeting(size)
        ranks = [
            Rank(group, segment, rank if domains > 1 else 0, domains == 1) for rank in range(size)
        ]
        check = rows_check if group.kind is GroupKind.STATE else entries_check

        def run(rank: int, check: Callable[..., None] = check) -> None:
            check(ranks[rank], segment, keeping, meeting.peers(rank))  # noqa: B023 - ends in here

        with ThreadPoolExecutor(size) as pool:
            list(pool.map(run, range(size)))


def entries_check(rank: Rank, segment: Segment, keeping: Keeping, peers: Threads) -> None:
    group = rank.group
    rows = Rows(segment, peers.rank, peers.size, rank.domain)
    ((seen, writes, exchanged),) = tables(rows, (group,), rank.table, keeping)
    assert seen is not None
    parts = peers.size if keeping is Keeping.HEADS else 1
    for part in range(parts):
        spread = Spread(
            peers,  # type: ignore[arg-type]
            [[exchanged.of_part(each, peers.rank, keeping, CPU)] for each in range(parts)],
            Counter(),
        )
        copy = spread.borrow(rank.cache, part)
        for row in range(rows.begin, rows.end):
            if writes[row - rows.begin] >= 0:
                each = rows.runs[rows.run_of[row]]
                value = name(each.keeper, each.run.slot, int(rows.positions[row]))
                lay(copy, *one(int(writes[row - rows.begin]), value))
        spread.start_share(copy, rank.cache, part).wait()
        for piece, number in enumerate(rows.pieces()):
            each = rows.runs[number]
            first = max(rows.begin, int(rows.starts[number]))
            last = min(rows.end, int(rows.starts[number + 1])) - 1
            low = max(0, int(rows.positions[first]) - group.window + 1) if group.window else 0
            for position in range(low, int(rows.positions[last]) + 1):
                if (position + 1) % group.tokens_per_entry == 0:
                    page = int(seen[piece, position // PAGE])
                    at = page * group.page_entries + position % PAGE // group.tokens_per_entry
                    found = read(copy, at)  # type: ignore[arg-type]
                    assert found == name(each.keeper, each.run.slot, position)
        for each in rows.runs:
            if each.own and (keeping is not Keeping.HEADS or part == peers.rank):
                for position in range(each.start, each.end):
                    if (position + 1) % group.tokens_per_entry == 0:
                        kept = rank.has(each.run.slot, position)
                        assert kept == name(each.keeper, each.run.slot, position)


def rows_check(rank: Rank, segment: Segment, keeping: Keeping, peers: Threads) -> None:
    group, ratio = rank.group, rank.group.clean_tokens or rank.group.snapshot_rows
    back = ratio if group.clean_tokens else 2 * ratio  # rows of the longest window
    rows = Rows(segment, peers.rank, peers.size, rank.domain)
    ((_, lines, exchanged),) = tables(rows, (group,), rank.table, keeping)
    spread = Spread(
        peers,  # type: ignore[arg-type]
        [[exchanged.of_part(0, peers.rank, keeping, CPU)]],
        Counter(),
    )
    copy = spread.borrow(rank.cache)
    assert isinstance(copy, StateRows)
    named = [
        name(rows.runs[n].keeper, rows.runs[n].run.slot, int(position))
        for n, position in zip(rows.run_of, rows.positions, strict=True)
    ]
    own = torch.full((rows.share, 2, 1), NAN, dtype=torch.float64)
    own[: rows.end - rows.begin] = torch.tensor(named[rows.begin : rows.end]).view(-1, 1, 1)
    gathered = spread.edges(copy, own)
    for piece, number in enumerate(rows.pieces()):
        each = rows.runs[number]
        begin = int(rows.positions[max(rows.begin, int(rows.starts[number]))])
        window = begin // ratio * ratio + ratio - back  # where the first that closes begins
        for position in range(max(0, window), begin):
            found = read(copy, int(lines[piece]) * group.rows + position % group.rows)
            assert found == name(each.keeper, each.run.slot, position)
    spread.keep(rank.cache, gathered)
    for each in rows.runs:
        if each.own:
            for position in range(max(0, each.end - group.rows), each.end):
                kept = rank.has(each.run.slot, position)
                assert kept == name(each.keeper, each.run.slot, position)


def test_rows_are_shared_in_order_and_evenly() -> None:
    runs = (TokenRun(0, 4, (1,) * 5), TokenRun(2, 0, (1,) * 6))
    segment = Segment(Phase.CHUNK, "cp", (RankTokens(runs[:1]), RankTokens(runs[1:])))
    spans = [Rows(segment, rank, 4, 0) for rank in range(4)]
    assert [(each.begin, each.end) for each in spans] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert [list(each.pieces()) for each in spans] == [[0], [0, 1], [1], [1]]
    assert len({each.share for each in spans}) == 1
    few = Rows(Segment(Phase.CHUNK, "cp", (RankTokens(runs[:1]),)), 3, 4, 0)
    assert (few.begin, few.end, list(few.pieces())) == (5, 5, [])
