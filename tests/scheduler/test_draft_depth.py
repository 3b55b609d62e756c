"""How many drafts: by gain, per load, with hysteresis; off where they lose (B-22, B-24)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from null_world import VOCAB, World, config_of, groups_of, request, sizes_of

from metainfer.executor.null import NullCost
from metainfer.scheduler.depth import (
    FIRST_PROBE,
    IN_VAIN,
    MARGIN,
    PLAIN_STEPS,
    Acceptance,
    DepthController,
    Level,
    choose,
)

MOST = 7
Cost = Callable[[int, int], float]


class Play:
    """A controller in a world of known costs and chances; time is counted beside plain decoding."""

    def __init__(self, cost: Cost, *, noise: float = 0.0, coverage: float = 1.0) -> None:
        self.controller = DepthController(MOST)
        self.cost, self.noise, self.coverage = cost, noise, coverage
        self.chance = random.Random(7)
        self.depths: list[int] = []
        self.seconds = self.plain = 0.0

    def steps(self, count: int, running: int, accept: float) -> Play:
        for _ in range(count):
            aimed = self.controller.aim(running)
            runs = []
            for _ in range(running):
                drafts = aimed if self.chance.random() < self.coverage else 0
                taken = 0
                while taken < drafts and self.chance.random() < accept:
                    taken += 1
                runs.append((drafts, taken))
            deepest = max(drafts for drafts, _ in runs)
            seconds = self.cost(running, deepest)
            self.seconds += seconds
            self.plain += self.cost(running, 0) * sum(1 + t for _, t in runs) / running
            told = seconds * (1 + self.chance.uniform(-self.noise, self.noise))
            self.controller.note(running, aimed, runs, told)
            self.depths.append(aimed)
        return self

    @property
    def changes(self) -> int:
        return sum(a != b for a, b in zip(self.depths, self.depths[1:], strict=False))

    @property
    def speed(self) -> float:
        """Tokens per second over those of plain decoding."""
        return self.plain / self.seconds


def tiers(running: int, depth: int) -> float:
    """From the fifth row of a sequence on, a step is on a slower tier."""
    return 1.0 + 0.05 * depth if depth <= 3 else 1.8 + 0.1 * depth


def steep(running: int, depth: int) -> float:
    return 1.0 + 0.3 * depth


def reads(running: int, depth: int) -> float:
    """Weights are read once; from 32 rows on, arithmetic counts."""
    return max(1.0, running * (1 + depth) / 32)


def exact(cost: Cost, running: int, accept: float) -> int:
    """The best depth by arithmetic on the true numbers."""
    gains = {
        depth: sum(accept**i for i in range(depth + 1)) / cost(running, depth)
        for depth in range(MOST + 1)
    }
    return max(gains, key=lambda depth: gains[depth] / (1.0 if depth else gains[0]))


def test_b24_three_beats_seven() -> None:
    assert exact(tiers, 1, 0.8) == 3
    play = Play(tiers).steps(2000, 1, 0.8)
    assert set(play.depths[-800:]) == {3} or play.depths[-800:].count(3) > 780
    assert play.speed > 2.0


def test_b24_none_beats_five() -> None:
    """A fifth accepted, each draft at three tenths of a step: five lose half, so does any depth."""
    five = sum(0.2**i for i in range(6)) / steep(1, 5)
    assert five < 0.6 and exact(steep, 1, 0.2) == 0
    play = Play(steep).steps(4000, 1, 0.2)
    assert play.depths[-1] == 0 and play.depths.count(0) > 0.97 * len(play.depths)
    assert play.speed > 0.98


def test_b24_more_load_is_shallower() -> None:
    play = Play(reads)
    found = []
    for running in (1, 4, 16, 64):
        play.steps(1500, running, 0.8)
        found.append(play.depths[-1])
    assert found == sorted(found, reverse=True)
    assert found[0] == 7 and found[-1] == 0
    assert play.steps(400, 1, 0.8).depths[-1] == 7  # a level remembers


def test_b24_zero_is_off_with_an_alarm_and_comes_back() -> None:
    play = Play(steep).steps(PLAIN_STEPS + IN_VAIN, 1, 0.0)
    assert play.controller.alarm and play.controller.aim(1) == 0
    play.steps(8000, 1, 0.0)
    assert play.speed > 0.98 and play.controller.alarm
    play = Play(tiers).steps(600, 1, 0.0)
    assert play.controller.aim(1) == 0
    play.steps(4 * FIRST_PROBE, 1, 0.9)
    assert play.controller.depth >= 3 and not play.controller.alarm


def test_b24_noise_does_not_make_it_swing() -> None:
    for accept in (0.3, 0.6, 0.8):
        play = Play(tiers, noise=0.15).steps(4000, 1, accept)
        assert play.changes < 40, (accept, play.changes)


def test_what_is_seldom_proposed_is_still_judged_rightly() -> None:
    """A text in which every fifth step has drafts, nearly all of them right: worth keeping; nearly
    all of them wrong: not."""
    good = Play(tiers, coverage=0.2).steps(4000, 1, 0.95)
    assert good.depths[-1] > 0 and good.speed > 1.1
    bad = Play(steep, coverage=0.2).steps(8000, 1, 0.05)
    assert bad.depths[-1] == 0 and bad.speed > 0.98


def test_a_new_level_begins_without_drafts() -> None:
    controller = DepthController(MOST)
    assert controller.aim(5) == 0
    for _ in range(PLAIN_STEPS):
        controller.note(5, 0, [(0, 0)] * 5, None)  # steps with a prompt in them tell no time
    assert controller.aim(5) == 0
    for _ in range(PLAIN_STEPS):
        controller.note(5, 0, [(0, 0)] * 5, 0.01)
    assert controller.aim(5) == 2 and controller.aim(9) == 0


gains = st.dictionaries(st.integers(1, MOST), st.floats(0.01, 10), max_size=MOST)


@given(st.integers(0, MOST), gains)
@settings(max_examples=300)
def test_no_depth_is_chosen_that_loses_by_its_own_numbers(
    current: int, given: dict[int, float]
) -> None:
    chosen = choose(current, given)
    assert chosen == 0 or given[chosen] >= 1
    if chosen != current and chosen:
        before = given.get(current, 0.0)
        assert given[chosen] > (1 + MARGIN) * (before if current else 1.0) or before < 1
    assert chosen != 0 or current == 0 or max(given.values(), default=0.0) < 1
    assert choose(chosen, given) == chosen  # it stays where it went


@given(
    st.lists(st.floats(0, 0.5), min_size=MOST, max_size=MOST),
    st.floats(0, 0.95),
    st.sampled_from((0.1, 0.5, 1.0)),
    st.sampled_from((1, 3, 8)),
)
@settings(max_examples=25, deadline=None)
def test_never_two_percent_slower_than_no_drafts(
    rises: list[float], accept: float, coverage: float, running: int
) -> None:
    sums = [1 + sum(rises[:depth]) for depth in range(MOST + 1)]
    play = Play(lambda _, depth: sums[depth], coverage=coverage).steps(6000, running, accept)
    assert play.speed > 0.98, (play.speed, play.depths[-1])


def test_unknown_depths_cost_the_least_that_neighbours_allow() -> None:
    level = Level()
    level.plain.extend([1.0] * PLAIN_STEPS)
    assert level.seconds(3) == 1.0  # nothing known: worth a trial
    level.verify[2] = level.plain.__class__([1.2, 1.2])
    level.verify[6] = level.plain.__class__([3.0, 3.0])
    assert level.seconds(1) == pytest.approx(1.1)
    assert level.seconds(3) == pytest.approx(1.3)  # on from 0 and 2, not half way to 6
    assert level.seconds(7) == pytest.approx(3.45)


def test_expected_tokens_by_hand() -> None:
    seen = Acceptance([0.0] * 3, [0.0] * 3)
    for drafts, taken in ((3, 3), (3, 1), (3, 0), (0, 0)):
        seen.note(drafts, taken)
    assert seen.tokens(1) == pytest.approx(1 + 0.75 * 2 / 3, abs=0.01)
    assert seen.tokens(2) == pytest.approx(1 + 0.75 * (2 / 3 + 2 / 3 * 1 / 2), abs=0.01)


# -- in the scheduler ------------------------------------------------------------------------------


class True_:
    """A source and a proposer that know the answer, with every `wrong`-th token off."""

    def __init__(self, wrong: int) -> None:
        self.wrong, self.world, self.asked = wrong, None, 0

    def forget(self, request_id: str) -> None: ...

    def propose(self, item: object, at: object, count: int) -> list[int]:
        if isinstance(item, str):  # as a device's proposer: by name, after `at` tokens
            name, place = item, at
        else:
            name = item.request_id  # type: ignore[attr-defined]
            place = len(at) - len(item.prompt)  # type: ignore[arg-type, attr-defined]
        answer = self.world.reference(name)  # type: ignore[attr-defined]
        found = [*answer[place : place + count], *[0] * count][:count]  # type: ignore[operator, misc]
        for i in range(count):
            self.asked += 1
            if self.wrong and self.asked % self.wrong == 0:
                found[i] = (found[i] + 1) % VOCAB
        return found


@pytest.mark.parametrize("late", [False, True], ids=["now", "late"])
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("shape", ["dense", "hybrid", "v4"])
def test_b24_a_depth_that_changes_changes_no_answer(shape: str, device: bool, late: bool) -> None:
    guess = True_(2)
    sizes = sizes_of(groups_of(shape, 8), pages=90, slots=3)
    config = config_of(
        max_running=3, max_drafts=4, adaptive_drafts=True, model_drafts=device, max_context=400
    )
    one = World(
        sizes,
        config,
        late=late,
        drafts=None if device else guess,
        proposer=guess if device else None,
        cost=NullCost(0.01, 0.001, 0.004),
        audited=False,
    )
    guess.world = one  # type: ignore[assignment]
    one.keep_plans = True
    for i in range(3):
        one.add(request(f"r{i}", [i, 1, 2], 110 - 30 * i))
    one.run()
    one.check()
    depths = [segment.drafts for plan in one.plans for segment in plan.segments]
    assert len(set(depths)) > 1, "the depth never changed"
    assert one.scheduler.stats().draft_gain is not None


def test_b22_a_fixed_depth_is_left_alone() -> None:
    guess = True_(1)
    one = World(
        sizes_of(groups_of("dense", 8), pages=90, slots=1),
        config_of(max_running=1, max_drafts=3, max_context=300),
        drafts=guess,
        cost=NullCost(0.01, 0.001, 0.004),
    )
    guess.world = one  # type: ignore[assignment]
    one.keep_plans = True
    one.add(request("r", [1, 2, 3], 120))
    one.run()
    one.check()
    verified = [s.drafts for plan in one.plans for s in plan.segments if s.phase == "verify"]
    assert len(verified) > 100 and set(verified[:-2]) == {3}
    assert one.scheduler.stats().draft_gain is None and one.scheduler.stats().draft_depth == 3


def test_a_draft_follows_every_token_that_is_known() -> None:
    """Drafts switched on while a result is late wait for it, instead of guessing one place off."""
    guess = True_(0)
    one = World(
        sizes_of(groups_of("dense", 8), pages=90, slots=2),
        config_of(max_running=2, max_drafts=4, adaptive_drafts=True, max_context=300),
        late=True,
        drafts=guess,
        cost=NullCost(0.01, 0.001, 0.0001),
    )
    guess.world = one  # type: ignore[assignment]
    for i in range(2):
        one.add(request(f"r{i}", [i, 1, 2], 60))
    one.run()
    one.check()
    counters = one.scheduler.counters
    assert counters.accepted_drafts == counters.drafted_tokens > 40


class One(True_):
    """Right for every request but one."""

    def propose(self, item: object, at: object, count: int) -> list[int]:
        found = super().propose(item, at, count)
        if item.request_id == "r1":  # type: ignore[attr-defined]
            found = [(token + 1) % VOCAB for token in found]
        return found


@pytest.mark.parametrize(("row", "least", "most"), [(0.0001, 30, 60), (0.003, 3, 8)])
def test_b24_a_request_whose_drafts_are_all_wrong_pauses_alone(
    row: float, least: int, most: int
) -> None:
    """As often as they cost it no more than half a step and a hundredth of its tokens."""
    guess = One(0)
    one = World(
        sizes_of(groups_of("dense", 8), pages=90, slots=2),
        config_of(max_running=2, max_drafts=4, adaptive_drafts=True, max_context=300),
        drafts=guess,
        cost=NullCost(0.01, 0.001, row),
    )
    guess.world = one  # type: ignore[assignment]
    one.keep_plans = True
    one.add(request("r0", [1, 2, 3], 250))
    one.add(request("r1", [4, 5, 6], 60))
    one.run()
    one.check()
    slots = {entry.request_id: entry.slot for plan in one.plans for entry in plan.new}
    drafted = dict.fromkeys(slots, 0)
    for plan in one.plans:
        for run in (r for s in plan.segments for rank in s.ranks for r in rank.runs):
            drafted[next(name for name, slot in slots.items() if slot == run.slot)] += (
                run.drafts > 0
            )
    assert drafted["r0"] > 25 and least <= drafted["r1"] <= most
    assert not one.scheduler.drafting._brought


class Wandering(True_):
    """Knows the greedy answers; of drawn ones it has something to say now and then, and is right by
    chance."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self.chance = random.Random(seed)

    def propose(self, item: object, at: object, count: int) -> list[int]:
        found = super().propose(item, at, count)
        if item.request_id.startswith("drawn"):  # type: ignore[attr-defined]
            if self.chance.random() < 0.4:
                return []
            right = self.chance.random() < 0.08
            found = [found[0] if right else (found[0] + 1) % VOCAB, *[0] * (count - 1)]
        return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("greedy", [True, False])
def test_b24_short_answers_that_wander_lose_nothing_in_a_mix(seed: int, greedy: bool) -> None:
    """A further row costs 0.3 of a step, as on two cores: answers of 96 tokens one after the other,
    of which every second wanders. They lose 2 % at most, the others gain what they did."""
    guess = Wandering(seed)
    one = World(
        sizes_of(groups_of("dense", 8), pages=90, slots=1),
        config_of(max_running=1, max_drafts=7, adaptive_drafts=True, max_context=300),
        drafts=guess,
        cost=NullCost(0.007, 0.001, 0.003),
        audited=False,
    )
    guess.world = one  # type: ignore[assignment]
    one.keep_plans = True
    costs = {"drawn": 0.0, "told": 0.0}
    for number in range(12):
        kind = ("told", "drawn")[number % 2]
        temperature = 0.0 if greedy or kind == "told" else 1.0
        one.add(request(f"{kind}{number}", [number, 1, 2], 96, temperature=temperature))
        done = len(one.plans)
        one.run()
        decodes = [plan for plan in one.plans[done:] if plan.segments[0].phase != "chunk"]
        if number > 1:  # the first two let it look around
            costs[kind] += sum(0.7 + 0.3 * plan.tokens for plan in decodes)
    one.check()
    assert 5 * 95 / costs["drawn"] > 0.98
    assert 5 * 95 / costs["told"] > 1.5
