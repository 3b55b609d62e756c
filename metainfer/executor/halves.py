"""A rank's part of a segment as two: the earlier rows and the later."""

from __future__ import annotations

from msgspec.structs import replace

from metainfer.core.step import RankTokens, TokenRun


def halves(rank: RankTokens) -> tuple[RankTokens, RankTokens]:
    """Rows in their order, padding last: as many in the first half as in the second, or one more.

    A function of how many rows there are alone, so ranks that have equally many cut alike. Who
    drafts is not cut: nothing is said of drafts and proposals but by a run's end.
    """
    total = rank.tokens + rank.padding
    room = -(-total // 2)
    first: list[TokenRun] = []
    second: list[TokenRun] = []
    for run in rank.runs:
        length = len(run.tokens)
        here = min(length, room)
        if here:
            first.append(run if here == length else _head(run, here))
        if here < length:
            second.append(run if not here else _tail(run, here))
        room -= here
    left = total - -(-total // 2) - sum(len(run.tokens) for run in second)
    return RankTokens(tuple(first), room), RankTokens(tuple(second), left)


def _head(run: TokenRun, count: int) -> TokenRun:
    logits = max(0, run.logits - (len(run.tokens) - count))
    return TokenRun(run.slot, run.start, run.tokens[:count], logits)


def _tail(run: TokenRun, count: int) -> TokenRun:
    tokens = run.tokens[count:]
    return replace(run, start=run.start + count, tokens=tokens, logits=min(run.logits, len(tokens)))
