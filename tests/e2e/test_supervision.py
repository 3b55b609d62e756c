"""The real server and engine with faults on order: restarts, hangs, NaN, lack of memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from faulty_server import TEXT, Faulty, faulty, own_cache
from served import eventually

from metainfer.server.restarts import Restarts
from metainfer.server.run import _last_words


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    environ = {"METAINFER_CACHE": str(own_cache(folder))}
    with faulty(folder, "--max-restarts", "9", environ=environ) as running:
        yield running


def test_a_client_that_leaves_frees_its_pages(server: Faulty) -> None:
    """`hold` keeps the sixteen answers open while somebody looks, however long that takes."""
    names = [f"metainfer_requests_{what}" for what in ("running", "waiting")]
    names.append("metainfer_kv_cache_usage_ratio")
    assert server.metrics(*names) == [0, 0, 0]
    server.order("hold")
    body = TEXT | {"prompt": [5] * 300, "max_tokens": 200, "stream": True, "n": 16}
    with httpx.stream("POST", f"{server.base}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        assert eventually(lambda: sum(server.metrics(*names)[:2]) == 16)
        running, _, used = server.metrics(*names)
        assert running > 0 and used > 0
    assert eventually(lambda: sum(server.metrics(*names)[:2]) == 0)
    assert server.metrics(*names) == [0, 0, 0]
    server.withdraw("hold")
    ended = httpx.get(f"{server.base}/page/status", timeout=120).json()["requests"]
    assert (ended["finished"], ended["cancelled"]) == (0, 1)


def test_nan_and_lack_of_memory_cost_one_request(server: Faulty) -> None:
    """Law 1: an error with its code, as an answer and as an event; then all is as before."""
    want = server.complete().json()["choices"][0]["text"]
    server.order("nan")
    broken = server.complete()
    assert broken.status_code == 500
    assert broken.json()["error"]["code"] == "non_finite_logits"
    server.order("hold")
    body = TEXT | {"stream": True, "max_tokens": 400}
    with httpx.stream("POST", f"{server.base}/v1/completions", json=body, timeout=120) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.order("nan")
        server.withdraw("hold")
        said = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert "[DONE]" not in said
    assert json.loads(said[-1])["error"]["code"] == "non_finite_logits"
    server.order("oom")
    assert server.complete().json()["choices"][0]["text"] == want
    assert server.metric("metainfer_non_finite_requests_total") == 2
    assert server.metric("metainfer_abandoned_steps_total") == 1
    assert server.health()["restarts"] == 0


def test_a_killed_engine_is_started_again(server: Faulty) -> None:
    before = server.health()["restarts"]
    want = server.complete().json()["choices"][0]["text"]
    server.order("hold")  # so that both requests are surely open at the kill
    body = TEXT | {"stream": True, "max_tokens": 500}
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(server.complete(max_tokens=500)))
    with httpx.stream("POST", f"{server.base}/v1/completions", json=body, timeout=120) as stream:
        lines = stream.iter_lines()
        next(lines)
        asking.start()
        names = [f"metainfer_requests_{what}" for what in ("running", "waiting")]
        assert eventually(lambda: sum(server.metrics(*names)) == 2)
        os.kill(server.engine(), signal.SIGKILL)
        last = [line for line in lines if line][-1]
    server.withdraw("hold")
    asking.join(240)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "engine_dead"
    assert int(answers[0].headers["retry-after"]) >= 1
    assert eventually(lambda: server.status() in ("restarting", "ready"))
    assert httpx.get(f"{server.base}/health/live", timeout=120).status_code == 200
    server.wait_ready()
    assert server.health()["restarts"] == before + 1
    assert server.metric("metainfer_engine_restarts_total") == before + 1
    assert server.metric("metainfer_engine_restart_seconds") > 0
    assert server.complete().json()["choices"][0]["text"] == want


def test_b30_a_hang_is_told_and_ended(tmp_path: Path) -> None:
    """With the interpreter's lock held: the stacks are printed, /ready says which step."""
    environ = {"METAINFER_CACHE": str(own_cache(tmp_path))}
    flags = ("--max-restarts", "9", "--hang-after", "3")
    with faulty(tmp_path, *flags, environ=environ) as server:
        for _ in range(9):  # once more where nobody looked in the seconds until its end
            told = _hang(server)
            server.wait_ready()
            if told is not None:
                break
        log = server.log.read_text()
    assert told is not None and told.status_code == 503
    assert "chunk, 1 runs, 3 tokens" in told.json()["reason"]
    assert "Timeout" in log and "in faulty_launch" in log
    assert re.search("the engine hangs: step [0-9]+: chunk, 1 runs, 3 tokens", log)


def _hang(server: Faulty) -> httpx.Response | None:
    """Let the engine hang in a request's first step; what /ready said meanwhile, if it was asked
    in time."""
    told, answers = None, list[httpx.Response]()
    server.order("lock")
    asking = threading.Thread(target=lambda: answers.append(server.complete()))
    asking.start()
    while asking.is_alive() and told is None:
        reading = httpx.get(f"{server.base}/health/ready", timeout=120)
        if reading.json()["status"] == "stalled":
            told = reading
        time.sleep(0.05)
    asking.join(240)
    assert answers[0].json()["error"]["code"] == "engine_dead"
    assert "it hung in step" in answers[0].json()["error"]["message"]
    return told


def test_a_crash_loop_ends_with_its_first_cause() -> None:
    restarts = Restarts(1)
    restarts.died("ValueError")
    restarts.died("the engine was killed by SIGKILL")
    words = _last_words(restarts, "the engine was killed by SIGKILL")
    assert "ended 2 times" in words and "First cause: ValueError." in words


def test_a_log_that_nobody_reads_stops_nothing_and_death_leaves_its_steps(tmp_path: Path) -> None:
    """Standard error is a pipe that is full: a restart goes on without its lines. The engine is
    killed once more than allowed: exit code 1, and the steps are read from the shared block."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    environ = {"METAINFER_CACHE": str(own_cache(tmp_path))}
    try:
        with faulty(tmp_path, "--max-restarts", "1", errors=writing, environ=environ) as server:
            server.order("raise")
            assert server.complete().status_code == 503
            assert eventually(lambda: server.status() == "restarting" or server.restarted())
            server.wait_ready()
            assert server.complete().status_code == 200
            os.kill(server.engine(), signal.SIGKILL)
            assert server.process.wait(60) == 1
    finally:
        os.close(reading)
        os.close(writing)
    dumps = sorted((tmp_path / "cache" / "records" / "flight").glob("*.json"))
    first, last = (json.loads(path.read_text()) for path in dumps)
    assert "ValueError" in first["cause"] and "SIGKILL" in last["cause"]
    assert first["flight"]["steps"][-1]["outcome"]["error"] == "ValueError"
    assert len(last["flight"]["steps"]) == 8 and last["plan"] and last["start_phases"]
