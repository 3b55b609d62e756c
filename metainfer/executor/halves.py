"""A segment, or a rank's part of one, as two: the earlier rows and the later."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from metainfer.core.step import RankTokens, Segment, TokenRun


def halves(rank: RankTokens) -> tuple[RankTokens, RankTokens]:
    """Rows in their order, padding last: as many in the first half as in the second, or one more.

    A function of how many rows there are alone, so ranks that have equally many cut alike. Who
    drafts is not cut: nothing is said of drafts and proposals but by a run's end.
    """
    total = rank.tokens + rank.padding
    room = -(-total // 2)
    first, second = _cut(rank.runs, room)
    ahead, behind = (sum(len(run.tokens) for run in half) for half in (first, second))
    return RankTokens(first, room - ahead), RankTokens(second, total - room - behind)


def halves_of(segment: Segment) -> tuple[Segment, Segment]:
    """All rows of a segment that ranks share, one domain's behind another's; at least two."""
    room = -(-sum(rank.tokens for rank in segment.ranks) // 2)
    first, second = [], []
    for rank in segment.ranks:
        ahead, behind = _cut(rank.runs, room)
        first.append(RankTokens(ahead))
        second.append(RankTokens(behind))
        room -= first[-1].tokens
    return replace(segment, ranks=tuple(first)), replace(segment, ranks=tuple(second))


def _cut(runs: Sequence[TokenRun], room: int) -> tuple[tuple[TokenRun, ...], tuple[TokenRun, ...]]:
    """The first `room` rows, or all, and the rest."""
    first, second = list[TokenRun](), list[TokenRun]()
    for run in runs:
        length = len(run.tokens)
        here = min(length, room)
        if here:
            first.append(run if here == length else _head(run, here))
        if here < length:
            second.append(run if not here else _tail(run, here))
        room -= here
    return tuple(first), tuple(second)


def _head(run: TokenRun, count: int) -> TokenRun:
    logits = max(0, run.logits - (len(run.tokens) - count))
    return TokenRun(run.slot, run.start, run.tokens[:count], logits)


def _tail(run: TokenRun, count: int) -> TokenRun:
    tokens = run.tokens[count:]
    return replace(run, start=run.start + count, tokens=tokens, logits=min(run.logits, len(tokens)))
