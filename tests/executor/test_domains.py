"""A plan over domains: every part goes to one of them, and the answers come back in order."""

from __future__ import annotations

import random

import pytest

from metainfer.core.request import SamplingParams
from metainfer.core.step import (
    NewRequest,
    PageCopy,
    PageGrant,
    Phase,
    RankTokens,
    RunResult,
    Segment,
    StateMove,
    StepPlan,
    TokenRun,
)
from metainfer.executor.domains import joined, of_domain

SLOTS = 4
PARAMS = SamplingParams(temperature=0.0)


def drawn(rng: random.Random, domains: int) -> StepPlan:
    def slot() -> int:
        return rng.randrange(domains * SLOTS)

    def runs(domain: int) -> tuple[TokenRun, ...]:
        mine = rng.sample(range(SLOTS), rng.randrange(SLOTS + 1))
        return tuple(
            TokenRun(
                domain * SLOTS + each,
                0,
                (1,) * rng.randrange(1, 5),
                proposals=rng.choice((0, 0, 1, 4)),
            )
            for each in mine
        )

    segments = tuple(
        Segment(
            Phase.MIXED,
            "x",
            tuple(RankTokens(runs(domain), rng.randrange(2)) for domain in range(domains)),
        )
        for _ in range(rng.randrange(1, 3))
    )
    entering = rng.sample(range(domains * SLOTS), rng.randrange(4))
    return StepPlan(
        7,
        segments,
        tuple(NewRequest(f"r{s}", s, s // SLOTS, (1, 2), 2, 0, PARAMS) for s in entering),
        tuple(PageGrant(slot(), 0, 0, (3,)) for _ in range(3)),
        tuple(PageCopy(0, rng.randrange(domains), 1, 2) for _ in range(2)),
        tuple(StateMove("zero", 1, s // SLOTS, s) for s in (slot(), slot())),
        (slot(), slot()),
    )


@pytest.mark.parametrize("domains", [1, 2, 4])
@pytest.mark.parametrize("level", [False, True])
def test_nothing_is_lost_and_answers_come_back_in_order(
    domains: int, level: bool, rng: random.Random
) -> None:
    for _ in range(50):
        plan = drawn(rng, domains)
        parts = [of_domain(plan, domain, SLOTS, level=level) for domain in range(domains)]
        for name in ("new", "pages", "copies", "moves", "released"):
            assert sum(len(getattr(part, name)) for part in parts) == len(getattr(plan, name))
        for domain, part in enumerate(parts):
            assert part.step == 7 and len(part.segments) == len(plan.segments)
            slots = [each.slot for each in (*part.new, *part.pages, *part.moves)]
            assert all(0 <= slot < SLOTS for slot in (*slots, *part.released))
            assert {each.domain for each in (*part.new, *part.copies, *part.moves)} <= {0}
            for mine, whole in zip(part.segments, plan.segments, strict=True):
                (rank,) = mine.ranks
                given = whole.ranks[domain]
                assert [r.slot + domain * SLOTS for r in rank.runs] == [r.slot for r in given.runs]
                if level:
                    widest = max(each.tokens + each.padding for each in whole.ranks)
                    assert rank.tokens + rank.padding == widest
                else:
                    assert (rank.padding, rank.drafting) == (given.padding, ())
            # As many further steps of drafts, of as many rows, on every rank; as some domain needs.
            for number, whole in enumerate(plan.segments if level else ()):
                (rank,) = part.segments[number].ranks
                wanted = [[run.proposals for run in each.runs] for each in whole.ranks]
                for ahead, rows in enumerate((*rank.drafting, 0), 1):
                    assert rows == max(sum(n > ahead for n in each) for each in wanted)
        answers = [
            [RunResult(r.slot, (r.slot,)) for s in part.segments for r in s.ranks[0].runs]
            for part in parts
        ]
        asked = [run.slot for s in plan.segments for rank in s.ranks for run in rank.runs]
        found = joined(plan, answers, SLOTS)
        assert [result.slot for result in found] == asked
        assert [result.tokens[0] for result in found] == [slot % SLOTS for slot in asked]


def test_an_answer_too_few_too_many_or_of_another_slot_is_told() -> None:
    run = TokenRun(SLOTS + 1, 0, (1,))
    plan = StepPlan(0, (Segment(Phase.DECODE, "x", (RankTokens((), 1), RankTokens((run,)))),))
    assert joined(plan, [[], [RunResult(1, (9,))]], SLOTS)[0].slot == SLOTS + 1
    for answers, told in (
        ([[], []], "domain 1 did not answer slot 5"),
        ([[], [RunResult(2)]], "domain 1 did not answer slot 5"),
        ([[RunResult(0)], [RunResult(1)]], "domain 0 answered more runs"),
    ):
        with pytest.raises(ValueError, match=told):
            joined(plan, answers, SLOTS)
