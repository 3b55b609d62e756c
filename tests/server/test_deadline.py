"""A request's time: when it is over the engine drops it, and the client is told what happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from fake_server import Answer, Running, call, chat_body, events, eventually, fake_server

from metainfer.core.errors import RequestError
from metainfer.core.request import Request, SamplingParams
from metainfer.engine.client import DemuxClient
from metainfer.server import deadline
from metainfer.server.generate import deltas
from metainfer.server.prepare import Times
from metainfer.server.run import run
from metainfer.server.state import ServerConfig, ServerState

CHAT = "/v1/chat/completions"
FOREVER = {"max_tokens": 2000}  # of which no more than five are given


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    with fake_server(["--request-timeout", "1.5"], ["--hold-at", "5"]) as running:
        yield running


def ask(running: Running, seconds: str | None, **extra: object) -> Answer:
    headers = {} if seconds is None else {"X-Request-Timeout": seconds}
    return call(running.port, "POST", CHAT, chat_body("hi", **FOREVER, **extra), headers)


@pytest.mark.parametrize(("asked", "limit"), [(None, "1.5"), ("0.3", "0.3"), ("900", "1.5")])
def test_an_answer_that_takes_too_long_is_a_504(
    slow: Running, asked: str | None, limit: str
) -> None:
    submitted, cancelled = slow.submitted(), slow.cancelled()
    answer = ask(slow, asked, n=2)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["type"]) == (
        504,
        "deadline_exceeded",
        "server_error",
    )
    assert f"within {limit} s" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    # Both, unless the time was over before they came to the engine.
    assert eventually(lambda: slow.cancelled() - cancelled == slow.submitted() - submitted)
    assert slow.submitted() - submitted in (0, 2)
    assert eventually(lambda: call(slow.port, "GET", "/health").json["pending"] == 0)


def test_a_stream_that_takes_too_long_ends_with_an_error_and_no_done(slow: Running) -> None:
    def texts_sent() -> int:
        answer = ask(slow, "1.2", stream=True)
        found = events(answer.raw)
        assert answer.status == 200 and found[-1] != "[DONE]"
        assert found[-1]["error"]["code"] == "deadline_exceeded"
        return sum(bool(e["choices"][0]["delta"].get("content")) for e in found[:-1])

    assert eventually(lambda: texts_sent() == 5)  # what came in time was sent


def test_what_is_done_in_time_is_untouched(slow: Running) -> None:
    def status() -> int:
        headers = {"X-Request-Timeout": "900"}
        return call(slow.port, "POST", CHAT, chat_body("say:ok"), headers).status

    assert eventually(lambda: status() == 200)  # a busy machine may need more than 1.5 s


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "", "1e9", "\u0665"])
def test_what_is_no_time_is_a_400(slow: Running, seconds: str) -> None:
    encoded = seconds.encode().decode("latin-1")
    answer = ask(slow, encoded)
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, "x-request-timeout")


def test_time_that_was_over_before_it_began() -> None:
    state = SimpleNamespace(config=ServerConfig(("m",), request_timeout_s=1.0))
    job = SimpleNamespace(arrived=-1e9, choices=[])
    deadline.note({})
    with pytest.raises(RequestError) as caught:
        deadline.arm(state, job)  # type: ignore[arg-type]
    assert caught.value.status == 504


class Silent(DemuxClient):
    """Takes requests and never answers."""

    def _send(self, message: object) -> None: ...


def test_time_that_is_over_before_the_choices_are_handed_over() -> None:
    """Several choices go out in tasks, one turn of the loop after the timer was set."""
    state = SimpleNamespace(
        config=ServerConfig(("m",), request_timeout_s=0.01),
        client=Silent(),
        metrics=SimpleNamespace(request_done=lambda *told: None),
        traces=None,
        opened=lambda choices: time.sleep(0.02),  # the timer is due before the loop has a turn
        closed=lambda choices: None,
    )

    async def go() -> None:
        choices = [
            SimpleNamespace(request=Request(name, (5,), SamplingParams(), ()), times=Times(),
                            text=SimpleNamespace(completion_tokens=0))
            for name in "ab"
        ]  # fmt: skip
        job = SimpleNamespace(arrived=time.perf_counter(), choices=choices)
        with pytest.raises(RequestError) as caught:
            async for _ in deltas(state, job):  # type: ignore[arg-type]
                pass
        assert caught.value.status == 504

    deadline.note({})
    run(asyncio.wait_for(go(), 60))


def test_the_wait_follows_the_measured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("metainfer.server.state.time.monotonic", lambda: now)
    state = ServerState(ServerConfig(("m",)), None, None, None)  # type: ignore[arg-type]
    assert state.retry_after_s(1) == 5.0  # nothing measured
    for _ in range(11):
        state.closed(2)
        now += 1.0
    assert state.retry_after_s(4) == pytest.approx(4 * 11 / 22)
    assert state.retry_after_s(4000) == 60.0
    assert state.retry_after_s(1) == 1.0
    now += 100.0
    assert state.retry_after_s(4) == 5.0  # too long ago to count


def test_the_order_of_priorities_can_be_turned() -> None:
    def state(higher: bool) -> ServerState:
        config = ServerConfig(("m",), higher_first=higher)
        return ServerState(config, None, None, None)  # type: ignore[arg-type]

    for given, lower, higher in ((None, 0, 0), (0, 0, 0), (3, 3, -3), (-(2**31), -(2**31), 2**31)):
        assert (state(False).priority(given), state(True).priority(given)) == (lower, higher)
