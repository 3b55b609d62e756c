"""B-24: not one accepted draft is an alarm, and a lucky one does not end it."""

from __future__ import annotations

import itertools
import random

from null_world import VOCAB, request, world_of

from metainfer.scheduler.metrics import ALL_IN_VAIN, ENOUGH_ACCEPTED, DraftWatch


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
