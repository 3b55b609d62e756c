"""The last minutes: percentiles against the sorted truth, slices that go, rates that add up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.engine.protocol import EngineStats
from metainfer.server.recent import SAMPLES, SLICE_S, WINDOW_S, History, Window

durations = st.floats(1e-5, 1e4)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(durations, st.integers(1, 5)), min_size=1, max_size=60))
def test_percentiles_are_within_half_a_bucket(observed: list[tuple[float, int]]) -> None:
    window = Window(Clock())
    for seconds, count in observed:
        window.observe(seconds, count)
    truth = sorted(seconds for seconds, count in observed for _ in range(count))
    found = window.percentiles()
    assert found.count == len(truth)
    for share, value in ((0.5, found.p50_s), (0.95, found.p95_s), (0.99, found.p99_s)):
        exact = truth[math.ceil(share * len(truth)) - 1]
        assert value == pytest.approx(exact, rel=0.0251)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    clock = Clock()
    window = Window(clock)
    window.observe(100.0)
    clock.now += WINDOW_S - SLICE_S
    window.observe(1.0)
    assert window.percentiles().count == 2
    clock.now += SLICE_S
    assert window.percentiles().count == 1
    assert window.percentiles().p99_s == pytest.approx(1.0, rel=0.03)
    clock.now += WINDOW_S
    empty = window.percentiles()
    assert (empty.count, empty.p50_s, empty.p99_s) == (0, None, None)


def test_a_busy_day_holds_one_entry_per_slice_and_bucket() -> None:
    clock = Clock()
    window = Window(clock)
    for step in range(20_000):
        clock.now += 1.0
        window.observe(0.001 * (1 + step % 7))
    assert len(window._slices) == 30
    assert max(len(counts) for _, counts in window._slices) <= 7


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-12])
def test_no_time_at_all_is_the_smallest_bucket(seconds: float) -> None:
    window = Window(Clock())
    window.observe(seconds)
    p50 = window.percentiles().p50_s
    assert p50 is not None and 0 < p50 < 2e-6


def test_rates_are_over_the_time_between_samples() -> None:
    history = History()
    history.take(100.0, EngineStats(prompt_tokens=50, generated_tokens=10))
    assert history.since(0.0) == []  # nothing to compare with
    history.take(104.0, EngineStats(running=2, prompt_tokens=90, generated_tokens=12))
    (sample,) = history.since(0.0)
    assert (sample.t, sample.running) == (104.0, 2)
    assert (sample.prompt_tok_s, sample.generated_tok_s) == (10.0, 0.5)
    assert history.since(104.0) == []


def test_a_clock_that_is_set_back_gives_no_negative_rate() -> None:
    history = History()
    history.take(100.0, EngineStats(generated_tokens=10))
    history.take(40.0, EngineStats(generated_tokens=20))
    history.take(42.0, EngineStats(generated_tokens=24))
    assert [sample.generated_tok_s for sample in history.since(0.0)] == [2.0]


def test_a_new_engine_counts_from_zero() -> None:
    history = History()
    history.take(100.0, EngineStats(generated_tokens=1000))
    history.take(102.0, EngineStats(generated_tokens=6))
    assert [sample.generated_tok_s for sample in history.since(0.0)] == [3.0]


def test_ten_minutes_are_kept() -> None:
    history = History()
    for step in range(SAMPLES + 50):
        history.take(float(step), EngineStats())
    assert len(history.since(-1.0)) == SAMPLES
    assert history.since(-1.0)[0].t == 50.0
