"""Verify runs shorten the way, never change the answer; prompts share a budget."""

from __future__ import annotations

import random

import pytest
from null_world import SHAPES, VOCAB, request, world_of

from metainfer.core.step import Phase
from metainfer.scheduler.share import share

# -- drafts ----------------------------------------------------------------------------------------


class Fixed:
    """Proposes the true continuation with every `wrong`-th token off."""

    def __init__(self, wrong: int) -> None:
        self.wrong, self.world, self.asked = wrong, None, 0

    def propose(self, item: object, tokens: list[int], limit: int) -> list[int]:
        answer = self.world.reference(item.request_id)  # type: ignore[attr-defined]
        at = len(tokens) - len(item.prompt)  # type: ignore[attr-defined]
        found = []
        for token in answer[at : at + limit]:
            self.asked += 1
            found.append(
                (token + 1) % VOCAB if self.wrong and self.asked % self.wrong == 0 else token
            )
        return found


@pytest.mark.parametrize("wrong", [0, 1, 3])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_drafts_shorten_the_way_but_not_the_answer(shape: str, wrong: int) -> None:
    drafts = Fixed(wrong)
    one = world_of(shape, max_drafts=4, drafts=drafts)
    drafts.world = one  # type: ignore[assignment]
    for i in range(3):
        one.add(request(f"r{i}", [i, 1, 2], 25))
    one.run()
    one.check()
    counters = one.scheduler.counters
    verified = [s for p in one.plans for s in p.segments if s.phase is Phase.VERIFY]
    assert verified and all(segment.drafts <= 4 for segment in verified)
    assert (counters.accepted_drafts == counters.drafted_tokens) is (wrong == 0)
    assert wrong != 1 or counters.accepted_drafts == 0
    if wrong == 0:
        assert len(one.plans) <= 3 + 25 / 4 + 2


@pytest.mark.parametrize(("step_tokens", "most"), [(9, 8), (40, 8), (400, 8)])
def test_drafts_stay_inside_budget_and_ring(step_tokens: int, most: int) -> None:
    """A cursor ring that remembers 8 tokens allows 8 drafts, whatever else allows 20."""
    drafts = Fixed(0)
    one = world_of("v4", max_drafts=20, drafts=drafts, step_tokens=step_tokens, pages=200)
    drafts.world = one  # type: ignore[assignment]
    for i in range(3):
        one.add(request(f"r{i}", [i, 1, 2], 60))
    one.run()
    one.check()
    assert all(plan.tokens <= step_tokens for plan in one.plans)
    runs = [run for plan in one.plans for r in plan.segments[0].ranks for run in r.runs]
    assert max(run.drafts for run in runs) <= most


# -- sharing the budget ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("priorities", "due", "budget", "given"),
    [
        ([0], [100], 40, [40]),
        ([0, 0], [100, 100], 40, [20, 20]),
        ([0, 0, 0], [100, 50, 5], 40, [20, 15, 5]),
        ([0, 0], [100, 5], 40, [35, 5]),
        ([0, 0], [5, 100], 40, [5, 35]),
        ([0, 1], [100, 100], 40, [40, 0]),
        ([0, 1, 1], [10, 100, 5], 40, [10, 25, 5]),
        ([0, 0], [9, 9], 1, [1, 0]),
        ([0, 0], [9, 9], 0, [0, 0]),
        ([], [], 9, []),
    ],
)
def test_share(priorities: list[int], due: list[int], budget: int, given: list[int]) -> None:
    assert share(priorities, due, budget) == given


def test_share_spends_what_is_due() -> None:
    draw = random.Random("share")
    for _ in range(2000):
        count = draw.randrange(1, 7)
        priorities = sorted(draw.randrange(3) for _ in range(count))
        due = [draw.randrange(1, 50) for _ in range(count)]
        budget = draw.randrange(0, 120)
        given = share(priorities, due, budget)
        assert sum(given) == min(budget, sum(due))
        assert all(0 <= x <= y for x, y in zip(given, due, strict=True))
