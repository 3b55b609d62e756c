"""B-24: not one accepted draft is an alarm, and a lucky one does not end it."""

from __future__ import annotations

import itertools
import random

import pytest
from null_world import VOCAB, request, world_of

from metainfer.scheduler.metrics import (
    ALIKE,
    ALL_IN_VAIN,
    ENOUGH_ACCEPTED,
    LONG_RUN,
    DraftWatch,
    RepeatWatch,
)


def test_b24_zero_acceptance_is_an_alarm_with_hysteresis() -> None:
    watch = DraftWatch()
    for _ in range(ALL_IN_VAIN // 4 - 1):
        watch.note(4, 0)
    assert watch.alarm == ""
    watch.note(4, 0)
    assert str(ALL_IN_VAIN) in watch.alarm
    watch.note(4, 1)
    assert watch.alarm, "one lucky draft ended the alarm"
    for _ in range(ENOUGH_ACCEPTED - 2):
        watch.note(4, 1)
        assert watch.alarm
    watch.note(4, 1)
    assert watch.alarm == ""
    watch.note(ALL_IN_VAIN - 1, 0)
    assert watch.alarm == ""


def test_b24_noise_does_not_raise_it() -> None:
    """At 5 % acceptance: no alarm in 100,000 runs; at zero within 128, then it stays."""
    draw, watch, changes = random.Random("noise"), DraftWatch(), 0
    for _ in range(100_000):
        watch.note(4, sum(draw.random() < 0.05 for _ in range(4)))
        changes += bool(watch.alarm)
    assert changes == 0
    raised = []
    for _ in range(1000):
        watch.note(4, 0)
        raised.append(bool(watch.alarm))
    assert sum(a != b for a, b in itertools.pairwise(raised)) == 1 and raised[127]


class Wrong:
    def propose(self, item: object, tokens: list[int], limit: int) -> list[int]:
        return [VOCAB] * limit  # no token that exists

    def forget(self, request_id: str) -> None: ...


def test_b24_the_scheduler_reports_it() -> None:
    one = world_of(max_drafts=7, drafts=Wrong(), max_context=200, pages=200)
    one.add(request("r", [1, 2], 60))
    one.run()
    one.check()
    assert one.scheduler.stats().draft_alarm == ""
    one.add(request("s", [1, 2, 3], 60))
    one.run()
    stats = one.scheduler.stats()
    assert stats.draft_alarm and stats.counters.accepted_drafts == 0
    assert stats.counters.drafted_tokens > ALL_IN_VAIN


def test_b24_one_token_over_and_over_in_several_answers_is_an_alarm() -> None:
    def answer(token: int, times: int = LONG_RUN) -> list[int]:
        return [1, 2, *[token] * times]

    watch = RepeatWatch()
    for number in range(1, ALIKE + 1):
        assert watch.alarm == ""
        watch.ended(answer(7))
        assert bool(watch.alarm) is (number == ALIKE)
    assert f"last {ALIKE} answers" in watch.alarm and "token 7" in watch.alarm
    watch.ended([5] * (LONG_RUN - 1))  # too short to tell
    assert watch.alarm
    watch.ended([*answer(7), 8])
    assert watch.alarm == ""
    for tokens in (answer(7), answer(7), answer(9), answer(7), answer(7), answer(7, LONG_RUN - 1)):
        watch.ended(tokens)  # loops of their own, as texts have them
        assert watch.alarm == ""


def test_b24_the_scheduler_reports_a_repeated_token_under_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that says 5 whatever it is asked; without drafts that is the model's own matter."""
    monkeypatch.setattr("metainfer.executor.null.next_token", lambda *_: 5)
    for most, drafts in ((2, Wrong()), (0, None)):
        one = world_of(max_drafts=most, drafts=drafts, max_context=200, pages=200)
        for number in range(ALIKE):
            assert one.scheduler.stats().draft_alarm == ""
            one.add(request(f"r{number}", [number, 2], LONG_RUN + 4))
            one.run()
        assert bool(one.scheduler.stats().draft_alarm) is (drafts is not None)
        assert drafts is None or "token 5" in one.scheduler.stats().draft_alarm
