"""Verify runs shorten the way, never change the answer; prompts share a budget."""

from __future__ import annotations

import random

import pytest
from null_world import SHAPES, VOCAB, World, request, world_of

from metainfer.core.step import PENDING, Phase, TokenRun
from metainfer.executor.null import straight_line
from metainfer.scheduler.share import share

# -- drafts ----------------------------------------------------------------------------------------


class Fixed:
    """Proposes the true continuation with every `wrong`-th token off."""

    def __init__(self, wrong: int) -> None:
        self.wrong, self.world, self.asked = wrong, None, 0

    def forget(self, request_id: str) -> None: ...

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


class Lying:
    """Proposes exactly what a script says, whatever is asked for."""

    def __init__(self, *drafts: int) -> None:
        self.drafts, self.forgotten = list(drafts), 0

    def propose(self, item: object, tokens: list[int], limit: int) -> list[int]:
        return self.drafts

    def forget(self, request_id: str) -> None:
        self.forgotten += 1


def runs_of(world: World) -> list[TokenRun]:
    return [r for p in world.plans for s in p.segments for rank in s.ranks for r in rank.runs]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("tokens", range(1, 12))
def test_no_draft_goes_beyond_max_tokens_or_context(tokens: int, late: bool) -> None:
    """The last token of an answer is never fed back, so no draft stands at its place."""
    for context in (100, 13):
        drafts = Fixed(0)
        one = world_of(max_drafts=7, drafts=drafts, late=late, max_context=context)
        drafts.world = one  # type: ignore[assignment]
        one.add(request("r", [1, 2, 3], tokens))
        one.run()
        one.check()
        limit = min(3 + tokens, context)
        assert max(run.end for run in runs_of(one)) == max(limit - 1, 3)
        assert len(one.answers["r"].tokens) == limit - 3


def test_a_source_that_proposes_too_much_is_cut() -> None:
    one = world_of(max_drafts=2, drafts=Lying(*range(9)))
    one.add(request("r", [1, 2, 3], 12))
    one.run()
    one.check()
    assert max(run.drafts for run in runs_of(one)) == 2


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_stop_inside_an_accepted_run_drops_what_follows(shape: str, device: bool) -> None:
    """Tokens after the stop are not told, and what was computed for them is not found again."""
    drafts, right = Fixed(0), Told()
    kind = {"proposer": right, "model_drafts": True} if device else {"drafts": drafts}
    one = world_of(shape, max_drafts=6, slots=1, **kind)
    drafts.world = right.world = one  # type: ignore[assignment]
    probe = request("probe", [9, 8, 7], 40)
    answer = straight_line(probe, one.sizes.groups, VOCAB, 100)
    for at in range(2, 20):
        if answer[at] in answer[:at]:
            continue
        one.add(request(f"s{at}", [9, 8, 7], 40, stop_token_ids=(answer[at],)))
        one.run()
        assert one.answers[f"s{at}"].tokens == answer[:at]
        assert one.answers[f"s{at}"].stop_token == answer[at]
    again = request("again", [9, 8, 7, *answer[:30]], 8)
    one.add(again)
    one.run()
    one.check()
    assert one.scheduler.counters.accepted_drafts > 20


class Told:
    """The device's own drafter, right or wrong by turns: `wrong` of each four."""

    def __init__(self, wrong: int = 0) -> None:
        self.wrong, self.world, self.made = wrong, None, 0

    def propose(self, request_id: str, sampled: int, count: int) -> list[int]:
        answer = self.world.reference(request_id) + [0] * (sampled + count)  # type: ignore[attr-defined]
        found = []
        for token in answer[sampled : sampled + count]:
            self.made += 1
            found.append((token + 1) % VOCAB if self.made % 4 < self.wrong else token)
        return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("wrong", [0, 1, 4])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_devices_drafts_travel_as_placeholders(shape: str, wrong: int, late: bool) -> None:
    told = Told(wrong)
    one = world_of(shape, max_drafts=4, model_drafts=True, proposer=told, late=late, pages=90)
    told.world = one  # type: ignore[assignment]
    for i in range(3):
        one.add(request(f"r{i}", [i, 1, 2], 25))
    one.run()
    one.check()
    counters = one.scheduler.counters
    verified = [run for run in runs_of(one) if run.drafts]
    assert verified
    assert all(run.tokens[-run.drafts :] == (PENDING,) * run.drafts for run in verified)
    assert (counters.accepted_drafts == counters.drafted_tokens) is (wrong == 0)
    assert (counters.accepted_drafts == 0) is (wrong == 4)
    if wrong == 0 and not late:
        assert len(one.plans) <= 3 + 25 / 4 + 2
    if late:  # nothing sits out for a run that verifies nothing: its end is known
        assert any(run.tokens[: -run.drafts] == (PENDING,) for run in verified)


def test_the_last_tokens_ask_for_no_proposals() -> None:
    """None beyond the answer's end, where the drafter would have no page to write to."""
    told = Told()
    one = world_of(max_drafts=7, model_drafts=True, proposer=told, max_context=16)
    told.world = one  # type: ignore[assignment]
    for tokens, proposals in ((1, 0), (2, 0), (3, 1), (4, 2), (100, 7)):
        one.add(request("r", [1, 2, 3], tokens))
        one.run()
        one.check()
        assert max(run.proposals for run in runs_of(one)) == proposals
        assert all(run.end + run.proposals - 1 <= 15 for run in runs_of(one))
        one.plans.clear()


@pytest.mark.parametrize("late", [False, True])
def test_cancelled_mid_verify_gives_everything_back(late: bool) -> None:
    drafts = Fixed(3)
    one = world_of("v4", max_drafts=5, drafts=drafts, late=late)
    drafts.world = one  # type: ignore[assignment]
    for i in range(4):
        one.add(request(f"r{i}", [i, 1, 2], 40))
    for _ in range(4):
        one.step()
    assert any(run.drafts for run in runs_of(one))
    for i in range(3):
        one.cancel(f"r{i}")
        one.scheduler.audit()
    one.run()  # ends with nothing held
    one.check()


def test_a_source_is_told_when_a_request_ends_or_yields() -> None:
    source = Lying(1)
    one = world_of(max_drafts=1, drafts=source, pages=12, slots=4)
    for i in range(4):
        one.add(request(f"r{i}", [i, 1, 2], 60))
    one.run()
    one.check()
    assert one.scheduler.counters.preemptions > 0
    assert source.forgotten == 4 + one.scheduler.counters.preemptions


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
