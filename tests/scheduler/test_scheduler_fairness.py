"""B-29 on a simulated clock: long prompts neither freeze answers nor starve short prompts."""

from __future__ import annotations

import itertools

import pytest
from null_world import VOCAB, World, groups_of, request, sizes_of

from metainfer.executor.null import NullCost
from metainfer.scheduler.config import SchedulerConfig
from metainfer.scheduler.domain import OVERTAKES

LONG = 300_000
MIXED = 2048
COST = NullCost(step_s=0.0036, prefill_token_s=70e-6, decode_token_s=20e-6)
BOUND = COST.step_s + MIXED * COST.prefill_token_s + 40 * 4 * COST.decode_token_s


def simulate(*, domains: int, mixed: int, late: bool, longs: int = 8, shorts: int = 32) -> World:
    """`shorts` running answers, then `longs` prompts of 300K tokens; to the end of the prompts."""
    sizes = sizes_of(groups_of("dense", 256), pages=16_000, slots=64, domains=domains, snapshots=0)
    config = SchedulerConfig(
        max_context=400_000, max_running=64, step_tokens=8192, mixed_prefill_tokens=mixed
    )
    world = World(sizes, config, late=late, contents=False, cost=COST, audited=False, caching=False)
    for i in range(shorts):
        world.add(request(f"short{i}", [i] * 100, 50_000))
    while not all(world.answers[f"short{i}"].tokens for i in range(shorts)):
        world.step()
    for i in range(longs):
        world.add(request(f"long{i}", [i] * LONG, 1))
    start = world.clock.now()
    while not all(world.answers[f"long{i}"].finish for i in range(longs)):
        world.step()
    world.prefill_s = world.clock.now() - start  # type: ignore[attr-defined]
    return world


def longest_gap(world: World, name: str) -> float:
    times = world.answers[name].times
    return max(b - a for a, b in itertools.pairwise(times))


@pytest.mark.parametrize(("late", "longs"), [(False, 8), (True, 2)])
def test_b29_gaps_are_bounded_and_prefill_hardly_slower(late: bool, longs: int) -> None:
    """8 prompts of 300K tokens and 32 answers: gaps are bounded, prefill at most 25 % slower."""
    mixed = simulate(domains=1, mixed=MIXED, late=late, longs=longs)
    worst = max(longest_gap(mixed, f"short{i}") for i in range(32))
    assert worst <= BOUND
    alone = simulate(domains=1, mixed=MIXED, late=late, longs=longs, shorts=0)
    assert mixed.prefill_s <= 1.25 * alone.prefill_s  # type: ignore[attr-defined]
    stats = mixed.scheduler.stats()
    assert stats.longest_decode_gap_s == pytest.approx(worst, rel=0.3)
    assert stats.longest_decode_gap_s <= BOUND


def test_b29_without_the_bound_answers_freeze() -> None:
    """The simulation can tell: with unbounded prompt rows the gap exceeds the bound."""
    free = simulate(domains=1, mixed=8192, late=False, longs=1)
    assert max(longest_gap(free, f"short{i}") for i in range(32)) > 3 * BOUND


def test_b29_other_domains_are_not_stalled() -> None:
    """Prompts fill some domains; answers in all of them keep the bound, and gaps are per domain."""
    world = simulate(domains=4, mixed=MIXED, late=False, longs=2)
    for i in range(32):
        assert longest_gap(world, f"short{i}") <= BOUND
    gaps = world.scheduler.stats().decode_gaps_s
    assert len(gaps) == 4 and all(0 < gap <= BOUND for gap in gaps)


def test_b29_the_bound_covers_domains_that_only_prefill() -> None:
    """All domains wait for the slowest: a prompt elsewhere is bounded while anyone decodes."""
    sizes = sizes_of(groups_of("dense", 64), pages=400, slots=4, domains=2)
    config = SchedulerConfig(
        max_context=9000, max_running=4, step_tokens=512, mixed_prefill_tokens=64
    )
    world = World(sizes, config, contents=False)
    world.keep_plans = True
    world.add(request("short", [1] * 10, 50))
    world.step()
    world.add(request("long", [2] * 8000, 1))
    world.run()
    shared = [p for p in world.plans if all(rank.runs for rank in p.segments[0].ranks)]
    alone = [p for p in world.plans if not p.segments[0].ranks[0].runs]
    assert len(shared) == 49 and all(p.segments[0].ranks[1].tokens == 64 for p in shared)
    assert alone and max(p.segments[0].ranks[1].tokens for p in alone) == 512


def test_b29_bound_holds_with_drafts() -> None:
    """Drafts come out of what the prompts leave, not on top of the bound."""

    class Guess:
        def propose(self, item: object, tokens: list[int], limit: int) -> list[int]:
            return [0] * limit

        def forget(self, request_id: str) -> None: ...

    sizes = sizes_of(groups_of("dense", 64), pages=2000, slots=16)
    config = SchedulerConfig(
        max_context=40_000, max_running=16, step_tokens=512, mixed_prefill_tokens=256, max_drafts=4
    )
    world = World(sizes, config, drafts=Guess(), contents=False, audited=False)
    world.keep_plans = True
    for i in range(8):
        world.add(request(f"short{i}", [i] * 10, 300))
    world.step()
    world.add(request("long", [1] * 10_000, 1))
    world.run()
    for plan in world.plans[1:]:
        runs = [run for s in plan.segments for r in s.ranks for run in r.runs]
        chunk = sum(len(run.tokens) for run in runs if not run.drafts and len(run.tokens) > 1)
        short = [run for run in runs if run.slot < 8]
        assert chunk <= 256 or not short
        assert plan.tokens <= 512
        assert all(run.end < 10 + 300 for run in short), "nothing is drafted past the end"
        assert len(short) in (0, 8) or any(a.finish for a in world.answers.values())


def test_b29_short_prompts_overtake_a_long_one_that_still_finishes() -> None:
    """Shorts wait for shorter ones only; the long prompt takes at most twice its time."""
    sizes = sizes_of(groups_of("dense", 256), pages=4000, slots=8)
    config = SchedulerConfig(
        max_context=400_000, max_running=8, step_tokens=2048, mixed_prefill_tokens=2048
    )

    def finish_long(rivals: bool) -> int:
        world = World(sizes, config, contents=False, audited=False, caching=False)
        world.add(request("long", [1] * 200_000, 1))
        steps, waits, started = 0, [], {}
        while not world.answers["long"].finish:
            if rivals:
                world.add(request(f"s{steps}", [2] * 1000, 1))
                started[f"s{steps}"] = steps
            world.step()
            steps += 1
            ended = [n for n in started if world.answers[n].finish]
            waits += [steps - started.pop(n) for n in ended]
        assert not rivals or max(waits) <= 3
        return steps

    alone, contested = finish_long(False), finish_long(True)
    assert alone < contested <= 2 * alone + 1


def test_b29_a_blocked_head_is_passed_but_not_starved() -> None:
    """Small requests run while a big prompt waits for pages; after `OVERTAKES` it is next."""
    sizes = sizes_of(groups_of("dense", 8), pages=21, slots=8)
    config = SchedulerConfig(max_context=150, max_running=8, step_tokens=64)
    world = World(sizes, config)
    world.keep_plans = True
    world.add(request("first", [1] * 60, 20))
    world.step()
    world.add(request("big", [2] * 120, 5))
    world.add(request("lower", [2], 5, priority=1))
    for i in range(150):
        world.add(request(f"s{i}", [3, i % VOCAB], 20))
        world.step()
        if world.answers["big"].tokens:
            break
    entered = [new.request_id for plan in world.plans for new in plan.new]
    passed = entered[1 : entered.index("big")]
    assert len(passed) == OVERTAKES, "a stream of small requests would starve it"
    assert "lower" not in passed, "nobody passes a more urgent one"
    world.run()
    world.check()
