"""Prompt look-up against a search that reads everything again each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.request import Request, SamplingParams
from metainfer.scheduler.ngram import NgramDrafts, NgramIndex


def searched(tokens: list[int], limit: int, longest: int, shortest: int, reach: int) -> list[int]:
    """The definition: longest suffix first, its latest earlier end among the last `reach`."""
    length = len(tokens)
    for size in range(longest, shortest - 1, -1):
        suffix = tokens[length - size :]
        for end in range(length - 1, max(size, length - reach) - 1, -1):
            if length > size and tokens[end - size : end] == suffix:
                copied = list(tokens)
                for i in range(limit):
                    copied.append(copied[end + i])  # may read what it has just written
                return copied[length:]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    first=st.integers(1, 60),
    steps=st.lists(st.integers(1, 5), max_size=30),
    limit=st.integers(0, 7),
    sizes=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    reach=st.sampled_from([1, 2, 5, 13, 1000]),
)
def test_it_finds_what_a_search_finds(
    tokens: list[int],
    first: int,
    steps: list[int],
    limit: int,
    sizes: tuple[int, int],
    reach: int,
) -> None:
    shortest, longest = sizes[0], sizes[0] + sizes[1]
    index = NgramIndex(range(longest, shortest - 1, -1), reach)
    length = first
    for step in [*steps, 0]:
        known = tokens[:length]
        expected = searched(known, limit, longest, shortest, reach)
        assert index.propose(known, limit) == expected
        assert index.held <= reach * (longest - shortest + 1)
        length += step


def test_ids_of_any_width_are_told_apart() -> None:
    """Keys are exact: (1, 0) is not (0, 1 << 31), nor any other pair."""
    index = NgramIndex([2], 1000)
    wide = 2**31 - 1
    assert index.propose([1, wide, 7, wide, 1], 2) == []
    assert index.propose([1, wide, 7, wide, 1, wide], 2) == [7, wide]


def test_a_repeating_text_is_continued_beyond_its_end() -> None:
    index = NgramIndex([3, 2], 1000)
    assert index.propose([5, 1, 2, 3, 1, 2, 3, 1], 7) == [2, 3, 1, 2, 3, 1, 2]
    assert NgramIndex([2], 1000).propose([4, 4, 4], 3) == [4, 4, 4]


def ask(name: str) -> Request:
    return Request(name, (1,), SamplingParams())


def test_requests_do_not_see_each_other_and_are_forgotten() -> None:
    drafts = NgramDrafts(longest=2, shortest=1)
    text = [1, 2, 3, 1]
    assert drafts.propose(ask("a"), text, 2) == [2, 3]
    assert drafts.propose(ask("b"), [1], 2) == []
    held = drafts.held
    drafts.forget("a")
    assert 0 == drafts.held < held
    assert drafts.propose(ask("a"), text, 2) == [2, 3]  # back after a preemption
    drafts.forget("nobody")
