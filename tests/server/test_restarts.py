"""How often and how soon a dead engine is started again; and a log without anything of a user's."""

from __future__ import annotations

import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import RequestError
from metainfer.server.journal import Journal
from metainfer.server.restarts import LONGEST_PAUSE_S, WINDOW_S, Restarts
from metainfer.server.state import ServerConfig, ServerState


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_pauses_double_and_end() -> None:
    restarts = Restarts(8, Time())
    pauses = [restarts.died(f"cause {i}") for i in range(9)]
    assert pauses[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert pauses[6:8] == [LONGEST_PAUSE_S] * 2 and pauses[8] is None
    assert restarts.first_cause == "cause 0" and restarts.deaths == 9


def test_none_are_allowed() -> None:
    restarts = Restarts(0, Time())
    assert restarts.next_pause_s is None and restarts.died("x") is None


@given(st.lists(st.floats(0, 400), min_size=1, max_size=40), st.integers(0, 5))
def test_never_more_than_so_many_within_the_window(waits: list[float], most: int) -> None:
    clock = Time()
    restarts, starts = Restarts(most, clock), []
    for wait in waits:
        clock.now += wait
        foretold = restarts.next_pause_s
        pause = restarts.died("x")
        assert pause == foretold
        if pause is not None:
            starts.append(clock.now)
    for start in starts:
        assert sum(start - WINDOW_S < other <= start for other in starts) <= most
    if most and min(waits) > WINDOW_S / most:
        assert len(starts) == len(waits)


def test_what_was_long_ago_is_forgotten() -> None:
    clock = Time()
    restarts = Restarts(1, clock)
    assert restarts.died("old") == 0.5
    clock.now = WINDOW_S + 1
    assert restarts.died("new") == 0.5 and restarts.first_cause == "new"


@given(st.text(min_size=6), st.integers(), st.floats(allow_nan=False))
def test_the_journal_keeps_templates_and_numbers(text: str, whole: int, real: float) -> None:
    journal = Journal()
    secret = f"secret<{text}>"
    for args in ((secret, whole), (secret, real)):
        journal.emit(
            logging.LogRecord("metainfer.x", logging.INFO, "f", 1, "got %s and %s", args, None)
        )
    try:
        raise ValueError(secret)
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    journal.emit(logging.LogRecord("metainfer.x", logging.ERROR, "f", 1, "broke", (), info))
    first, second, broke = journal.lines()
    assert secret not in str(journal.lines())
    assert first["message"].endswith(f"and {whole}") and second["message"].endswith(f"and {real}")
    assert first["message"].split(" and ")[0] == second["message"].split(" and ")[0]
    assert broke["error"] == "ValueError"
    assert broke["places"][-1].startswith("tests/server/test_restarts.py:")


def test_the_journal_forgets_and_survives_bad_lines() -> None:
    journal = Journal()
    for number in range(600):
        journal.add(f"line {number}")
    assert len(journal.lines()) == 500 and journal.lines()[0]["message"] == "line 100"
    journal.emit(logging.LogRecord("x", logging.INFO, "f", 1, "%d items", ("many",), None))
    assert journal.lines()[-1]["message"] == "%d items"


class Engine:
    """As much of a client as a status needs."""

    alive, hung, phase = True, "", "weights"


def test_a_hang_and_a_restart_are_statuses_with_reasons() -> None:
    engine = Engine()
    state = ServerState(ServerConfig(("m",)), engine, None, None)  # type: ignore[arg-type]
    state.info, state.text = object(), object()  # type: ignore[assignment]
    assert state.status == "ready"
    engine.hung = "step 3: decode, 1 runs, 1 tokens, without a result for 9 s"
    assert state.status == "stalled" and "step 3: decode" in state.reason
    engine.hung = ""
    state.restarting, state.back_at = "the engine was killed by SIGKILL", time.monotonic() + 7
    assert state.status == "restarting" and "SIGKILL" in state.reason and "weights" in state.reason
    with pytest.raises(RequestError) as caught:
        state.serving()
    assert (caught.value.status, caught.value.code) == (503, "engine_dead")
    assert caught.value.retry_after_s is not None and 1 <= caught.value.retry_after_s <= 7
    state.back_at = time.monotonic() - 1
    with pytest.raises(RequestError) as caught:
        state.serving()
    assert caught.value.retry_after_s == 5
    state.restarting, engine.alive = "", False
    assert state.status == "engine_dead"
