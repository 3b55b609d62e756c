"""Steps for which memory did not suffice: every answer stays what it is, the cause alone ends."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from null_world import SHAPES, VOCAB, World, request, world_of

from metainfer.core.errors import InternalError
from metainfer.core.request import FinishReason
from metainfer.core.step import OUT_OF_MEMORY, StepPlan
from metainfer.scheduler.ngram import NgramDrafts

Lacks = Callable[[StepPlan, list[str]], bool]


def names_in(world: World, plan: StepPlan) -> list[str]:
    slots = world.device._slots
    return [
        slots[run.slot].entry.request_id
        for segment in plan.segments
        for rank in segment.ranks
        for run in rank.runs
    ]


def step(world: World, lacks: Lacks, rng: random.Random) -> bool:
    """A turn of the loop; a step that lacks memory fails before, or after, all of its work."""
    scheduler, device = world.scheduler, world.device
    plan = scheduler.schedule()
    if plan is None:
        assert not scheduler.has_work, "stuck"
        return False
    # A device takes in the plan's diff before it allocates anything.
    device._execute(StepPlan(plan.step, (), plan.new, plan.pages, released=plan.released))
    rest = StepPlan(plan.step, plan.segments, (), (), plan.copies, plan.moves)
    if scheduler.trials.wanted is not None:  # a trial is about its members alone
        assert set(names_in(world, plan)) <= set(scheduler.trials.wanted)
    if lacks(plan, names_in(world, plan)):
        if rng.random() < 0.5:
            device.execute(rest)
        outputs = scheduler.abandon("no memory")
    else:
        outputs = scheduler.commit(device.execute(rest))
    for output in outputs:
        world._take(output)
        if output.finish is FinishReason.ERROR:
            assert output.code == OUT_OF_MEMORY
    scheduler.audit()
    return scheduler.has_work


def run(world: World, lacks: Lacks, rng: random.Random, limit: int = 4000) -> int:
    # Everything is put back at once, drafts or not: that drafts give way first is not the question.
    world._no_draft_holds_a_page = lambda domain, victim: None  # type: ignore[method-assign]
    for turn in range(limit):
        if not step(world, lacks, rng):
            return turn
    raise AssertionError(f"not finished after {limit} steps")


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    seed=st.integers(0, 10**6),
    most=st.integers(1, 5),
    longest=st.integers(16, 40),
    culprit=st.booleans(),
    drafts=st.booleans(),
    domains=st.integers(1, 2),
)
def test_b28_any_lack_of_memory_ends_at_most_its_cause(
    shape: str, seed: int, most: int, longest: int, culprit: bool, drafts: bool, domains: int
) -> None:
    rng = random.Random(seed)
    more = {"drafts": NgramDrafts(), "max_drafts": 3} if drafts else {}
    world = world_of(shape, slots=4, domains=domains, **more)
    for number in range(rng.randrange(2, 7)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
        world.add(request(f"r{number}", prompt, rng.randrange(1, 12)))
    bad = "r1" if culprit else ""

    def lacks(plan: StepPlan, names: list[str]) -> bool:
        chunk = max(len(run.tokens) for s in plan.segments for rank in s.ranks for run in rank.runs)
        if bad in names or len(names) > most or chunk > longest:
            return True
        return len(names) > 1 and rng.random() < 0.02

    run(world, lacks, rng)
    world.check()
    ended = [name for name, answer in world.answers.items() if answer.finish is FinishReason.ERROR]
    assert ended == ([bad] if culprit else [])
    for manager in world.kv:
        manager.flush()
    world.scheduler.audit()


def test_what_fitted_bounds_what_runs_until_it_is_idle() -> None:
    world, rng = world_of(slots=4), random.Random(0)
    for number in range(4):
        world.add(request(f"r{number}", [number] * 9, 12))
    seen: list[int] = []

    def lacks(plan: StepPlan, names: list[str]) -> bool:
        seen.append(len(names))
        return len(names) > 2

    run(world, lacks, rng)
    trials = world.scheduler.trials
    assert trials.most_running == 2 and seen.count(4) == 1
    world.add(request("later", [3, 4], 2))
    assert trials.most_running > 100


def test_one_that_fails_alone_is_tried_with_shorter_chunks_and_then_ends() -> None:
    world, rng = world_of(slots=2, step_tokens=64, max_context=100), random.Random(0)
    world.add(request("long", list(range(40)) + [1] * 24, 4))
    seen: list[int] = []

    def lacks(plan: StepPlan, names: list[str]) -> bool:
        seen.append(plan.tokens)
        return True

    run(world, lacks, rng)
    assert seen == [64, 64, 32, 16]
    assert world.answers["long"].finish is FinishReason.ERROR
    assert world.scheduler.trials.most_tokens > 10**6


def test_a_plan_must_be_open() -> None:
    world = world_of()
    with pytest.raises(InternalError, match="0 plans"):
        world.scheduler.abandon("no memory")


def test_a_request_that_leaves_does_not_hold_up_the_trial() -> None:
    world, rng = world_of(slots=4), random.Random(0)
    for number in range(4):
        world.add(request(f"r{number}", [number] * 9, 12))
    fail = [True]

    def lacks(plan: StepPlan, names: list[str]) -> bool:
        return len(names) == 4 and bool(fail) and bool(fail.pop())

    step(world, lacks, rng)
    assert set(world.scheduler.trials.wanted or ()) == {"r0", "r1"}
    world.cancel("r0")
    world.cancel("r1")
    run(world, lacks, rng)
    assert [world.answers[f"r{n}"].finish for n in (2, 3)] == [FinishReason.LENGTH] * 2
    world.check()


def test_members_that_were_not_in_the_step_are_tried_after_those_that_were() -> None:
    world, rng = world_of(slots=3), random.Random(0)
    for number in range(4):
        world.add(request(f"r{number}", [number] * 5, 12))
    trials = world.scheduler.trials
    trials._begin([{f"r{number}": 5 for number in range(4)}])
    failures = [True]
    step(world, lambda plan, names: bool(failures) and bool(failures.pop()), rng)
    assert [set(batch) for batch in trials._batches] == [{"r0"}, {"r1", "r2"}, {"r3"}]
    run(world, lambda plan, names: False, rng)
    world.check()
