"""A part of a segment as two halves: together they are the whole, in its order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.step import Phase, RankTokens, Segment, TokenRun
from metainfer.executor.halves import halves, halves_of


@st.composite
def ranks(draw: st.DrawFn) -> RankTokens:
    lengths = draw(st.lists(st.integers(1, 9), max_size=5))
    runs = []
    for slot, length in enumerate(lengths):
        start = draw(st.integers(0, 50))
        logits = draw(st.integers(0, length))
        tokens = tuple(range(100 * slot, 100 * slot + length))
        runs.append(TokenRun(slot, start, tokens, logits, samples=logits > 0))
    return RankTokens(tuple(runs), draw(st.integers(0, 12)))


def rows(rank: RankTokens) -> list[tuple[int, int, int, bool]]:
    """Slot, position, id and whether logits are wanted, of every row that is not padding."""
    return [
        (run.slot, run.start + at, token, at >= len(run.tokens) - run.logits)
        for run in rank.runs
        for at, token in enumerate(run.tokens)
    ]


@given(ranks())
def test_halves_are_the_whole_in_its_order(rank: RankTokens) -> None:
    first, second = halves(rank)
    assert rows(first) + rows(second) == rows(rank)
    assert all(run.tokens for half in (first, second) for run in half.runs)
    assert {run.slot for half in (first, second) for run in half.runs if run.samples} == {
        run.slot for run in rank.runs if run.samples
    }


@given(ranks(), ranks())
def test_ranks_of_equally_many_rows_cut_alike(one: RankTokens, other: RankTokens) -> None:
    total = max(each.tokens + each.padding for each in (one, other))
    for rank in (one, other):
        level = RankTokens(rank.runs, total - rank.tokens)
        first, second = halves(level)
        assert first.tokens + first.padding == -(-total // 2)
        assert second.tokens + second.padding == total // 2
        assert not first.padding or not second.runs  # padding is last


@given(st.lists(ranks(), min_size=1, max_size=4))
def test_halves_of_shared_rows_are_the_whole_in_its_order(lists: list[RankTokens]) -> None:
    """One domain behind another; a domain may be in one half alone."""
    segment = Segment(Phase.CHUNK, "cp", tuple(lists), 7)
    parts = halves_of(segment)
    every = [[row for rank in part.ranks for row in rows(rank)] for part in parts]
    whole = [row for rank in lists for row in rows(rank)]
    assert every[0] + every[1] == whole and len(every[0]) == -(-len(whole) // 2)
    for domain, rank in enumerate(lists):
        first, second = (part.ranks[domain] for part in parts)
        assert rows(first) + rows(second) == rows(rank)
    assert all((part.phase, part.layout, part.bucket) == (Phase.CHUNK, "cp", 7) for part in parts)


def test_a_run_ends_in_the_half_that_has_its_end() -> None:
    run = TokenRun(3, 10, (1, 2, 3, 4, 5), 5, samples=True, proposals=2)
    first, second = halves(RankTokens((run,)))
    assert first.runs == (TokenRun(3, 10, (1, 2, 3), 3),)
    assert second.runs == (TokenRun(3, 13, (4, 5), 2, samples=True, proposals=2),)
