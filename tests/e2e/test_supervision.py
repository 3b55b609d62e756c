"""The real server and engine with faults on order: restarts, hangs, NaN, lack of memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from faulty_server import TEXT, Faulty, eventually, faulty


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    with faulty(tmp_path_factory.mktemp("faulty"), "--max-restarts", "9") as running:
        yield running


def test_nan_and_lack_of_memory_cost_one_request(server: Faulty) -> None:
    """Law 1: an error with its code, as an answer and as an event; then all is as before."""
    want = server.complete().json()["choices"][0]["text"]
    server.order("nan")
    broken = server.complete()
    assert broken.status_code == 500
    assert broken.json()["error"]["code"] == "non_finite_logits"
    server.order("nan")
    with httpx.stream("POST", f"{server.base}/v1/completions", json=TEXT | {"stream": True}) as got:
        lines = [line for line in got.iter_lines() if line.startswith("data: ")]
    # The fault came with the first token, before any header was sent, or as an event after it.
    said = json.loads(lines[-1].removeprefix("data: ")) if lines else None
    assert said is None or said["error"]["code"] == "non_finite_logits"
    server.order("oom")
    assert server.complete().json()["choices"][0]["text"] == want
    assert server.metric("metainfer_non_finite_requests_total") == 2
    assert server.metric("metainfer_abandoned_steps_total") == 1
    assert server.health()["restarts"] == 0


def test_a_killed_engine_is_started_again(server: Faulty) -> None:
    before = server.health()["restarts"]
    want = server.complete().json()["choices"][0]["text"]
    body = TEXT | {"stream": True, "max_tokens": 500}
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(server.complete(max_tokens=500)))
    with httpx.stream("POST", f"{server.base}/v1/completions", json=body, timeout=120) as stream:
        lines = stream.iter_lines()
        next(lines)
        asking.start()
        assert eventually(lambda: server.health()["running"] == 2)
        os.kill(server.engine(), signal.SIGKILL)
        last = [line for line in lines if line][-1]
    asking.join(120)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "engine_dead"
    assert int(answers[0].headers["retry-after"]) >= 1
    assert eventually(lambda: server.status() in ("restarting", "ready"))
    assert httpx.get(f"{server.base}/health/live", timeout=30).status_code == 200
    server.wait_ready()
    assert server.health()["restarts"] == before + 1
    assert server.metric("metainfer_engine_restarts_total") == before + 1
    assert server.metric("metainfer_engine_restart_seconds") > 0
    assert server.complete().json()["choices"][0]["text"] == want


def test_a_crash_loop_ends_with_its_first_cause(tmp_path: Path) -> None:
    with faulty(tmp_path, "--max-restarts", "1") as server:
        server.order("raise")
        assert server.complete().status_code == 503
        server.wait_ready()
        os.kill(server.engine(), signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert "First cause: ValueError" in server.log.read_text()


@pytest.mark.parametrize("fault", ["hang", "lock"])
def test_b30_a_hang_is_told_and_ended(tmp_path: Path, fault: str) -> None:
    """With the interpreter's lock held, too: the stacks are printed, /ready says which step."""
    with faulty(tmp_path, "--hang-after", "1.5") as server:
        server.order(fault)
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(server.complete()))
        asking.start()
        assert eventually(lambda: server.status() == "stalled")
        ready = httpx.get(f"{server.base}/health/ready", timeout=30)
        if ready.json()["status"] == "stalled":  # else the engine was ended in between
            assert ready.status_code == 503 and "chunk, 1 runs, 3 tokens" in ready.json()["reason"]
        asking.join(120)
        assert answers[0].json()["error"]["code"] == "engine_dead"
        assert "it hung in step" in answers[0].json()["error"]["message"]
        server.wait_ready()
        log = server.log.read_text()
        assert "Timeout" in log and "in faulty_run" in log
        assert "the engine hangs: step 0: chunk, 1 runs, 3 tokens" in log


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """Standard output is a pipe that is full and never read; a restart would print into it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    try:
        with faulty(tmp_path, out=writing) as server:
            server.order("raise")
            assert server.complete().status_code == 503
            assert eventually(lambda: server.status() == "restarting" or server.restarted())
            server.wait_ready()
            assert server.complete().status_code == 200
    finally:
        os.close(reading)
        os.close(writing)
