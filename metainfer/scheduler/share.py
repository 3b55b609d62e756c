"""How prefills share a step's token budget (B-29).

The rule, within a priority: the oldest prompt gets half of the budget, the other half goes to the
shortest remaining first, and what is left over returns to the oldest. Hence a long prompt takes at
most twice as long as alone, however many short ones keep arriving, and a short prompt waits only
for shorter ones, never for a long one. A lower priority number takes the whole budget first.
"""

from __future__ import annotations

from collections.abc import Sequence


def share(priorities: Sequence[int], due: Sequence[int], budget: int) -> list[int]:
    """Tokens for each prefill, listed oldest first within ascending `priorities`; sums to at most
    `budget`, and to exactly that when enough is due."""
    given = [0] * len(due)
    begin = 0
    while begin < len(due) and budget > 0:
        end = begin + 1
        while end < len(due) and priorities[end] == priorities[begin]:
            end += 1
        budget -= _split(due, given, begin, end, budget)
        begin = end
    return given


def _split(due: Sequence[int], given: list[int], begin: int, end: int, budget: int) -> int:
    """Share among equals `begin .. end - 1`; returns what was spent."""
    alone = end - begin == 1
    given[begin] = min(due[begin], budget if alone else max(1, budget // 2))
    left = budget - given[begin]
    for i in sorted(range(begin + 1, end), key=lambda i: (due[i], i)):
        given[i] = min(due[i], left)
        left -= given[i]
    more = min(due[begin] - given[begin], left)
    given[begin] += more
    return budget - left + more
