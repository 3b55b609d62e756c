"""Start, crash, kill, drain: nobody waits for the dead, and no process is left."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

from fake_server import (
    HERE,
    Answer,
    Running,
    call,
    chat_body,
    descendants,
    events,
    eventually,
    fake_server,
    is_alive,
    is_error_body,
)

from metainfer.server.state import ServerConfig, ServerState

CHAT = "/v1/chat/completions"


def open_stream(running: Running, text: str, **extra: object) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
    body = json.dumps(chat_body(text, stream=True, **extra))
    connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.connection = connection  # type: ignore[attr-defined]
    return response


def test_client_that_leaves_a_stream_cancels_in_the_engine() -> None:
    with fake_server(engine=["--hold-at", "1"]) as running:
        response = open_stream(running, "long", max_tokens=2000, n=3)
        assert response.readline().startswith(b"data: ")
        response.connection.close()  # type: ignore[attr-defined]
        response.close()
        assert eventually(lambda: running.cancelled() == 3)
        assert eventually(lambda: call(running.port, "GET", "/health").json["pending"] == 0)


def test_client_that_leaves_an_answer_cancels_in_the_engine() -> None:
    with fake_server(engine=["--hold-at", "1"]) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port)
        body = json.dumps(chat_body("long", max_tokens=2000))
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        assert eventually(lambda: running.submitted() == 1)
        connection.close()
        assert eventually(lambda: running.cancelled() == 1)


def test_stop_string_cancels_in_the_engine() -> None:
    with fake_server(engine=["--hold-at", "60"]) as running:
        text = call(running.port, "POST", CHAT, chat_body("go", max_tokens=50)).json
        letters = text["choices"][0]["message"]["content"]
        body = chat_body("go", max_tokens=2000, stop=letters[5:8])
        answer = call(running.port, "POST", CHAT, body).json
        assert answer["choices"][0]["message"]["content"] == letters[:5]
        assert eventually(lambda: running.cancelled() == 1)


def test_killed_server_takes_the_engine_with_it() -> None:
    with fake_server() as running:
        children = descendants(running.process.pid)
        assert running.engine in children
        running.process.kill()
        running.process.wait()
        assert eventually(lambda: not any(map(is_alive, children)))


def test_killed_engine_fails_streams_and_ends_the_server() -> None:
    with fake_server(engine=["--hold-at", "1"]) as running:
        children = descendants(running.process.pid)
        response = open_stream(running, "long", max_tokens=2000)
        response.readline()
        waiting: list[Answer] = []
        ask = threading.Thread(
            target=lambda: waiting.append(
                call(running.port, "POST", CHAT, chat_body("other", max_tokens=2000))
            )
        )
        ask.start()
        assert eventually(lambda: running.submitted() == 2)
        os.kill(running.engine, signal.SIGKILL)
        last = events(response.read())[-1]
        ask.join(120)
        assert is_error_body(last) and last["error"]["code"] == "engine_dead"
        assert waiting[0].status == 503
        assert waiting[0].json["error"]["code"] == "engine_dead"
        assert running.process.wait(60) == 1
        assert not any(map(is_alive, children))


def test_engine_that_dies_by_itself_mid_stream() -> None:
    with fake_server(engine=["--die-at", "5"]) as running:
        seen = events(open_stream(running, "hi", max_tokens=50).read())
        assert "[DONE]" not in seen
        assert seen[-1]["error"]["code"] == "engine_dead"
        assert "status 3" in seen[-1]["error"]["message"]
        assert running.process.wait(60) == 1


def test_sigterm_drains() -> None:
    with fake_server(["--grace", "600"], ["--hold-at", "1"]) as running:
        response = open_stream(running, "drain me", max_tokens=100)
        response.readline()
        running.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: call(running.port, "GET", "/ready").status == 503)
        ready = call(running.port, "GET", "/ready")
        assert ready.json["status"] == "draining"
        assert call(running.port, "GET", "/health/live").status == 200
        late = call(running.port, "POST", CHAT, chat_body("late"))
        assert (late.status, late.json["error"]["code"]) == (503, "draining")
        assert int(late.headers["retry-after"]) >= 1
        running.release()
        seen = events(response.read())
        assert seen[-1] == "[DONE]"
        text = "".join(
            choice["delta"].get("content", "") for chunk in seen[:-1] for choice in chunk["choices"]
        )
        assert len(text) == 100
        assert running.process.wait(60) == 0
        assert not is_alive(running.engine)


def test_second_signal_stops_at_once() -> None:
    with fake_server(["--grace", "3600"], ["--hold-at", "1"]) as running:
        response = open_stream(running, "slow", max_tokens=2000)
        response.readline()
        running.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: call(running.port, "GET", "/ready").status == 503)
        running.process.send_signal(signal.SIGINT)
        running.process.wait(60)  # far less than the grace
        assert not is_alive(running.engine)


def test_grace_ends() -> None:
    with fake_server(["--grace", "0.5"], ["--hold-at", "1", "--ignore-stop"]) as running:
        response = open_stream(running, "slow", max_tokens=2000)
        response.readline()
        running.process.send_signal(signal.SIGTERM)
        last = events(response.read())[-1]
        assert last["error"]["code"] == "engine_dead" and "stops" in last["error"]["message"]
        assert running.process.wait(60) == 0
        assert not is_alive(running.engine)


def test_while_loading_probes_say_so() -> None:
    with fake_server(engine=["--hang-at-start"], ready=False) as running:
        assert eventually(lambda: _status(running, "/health/live") == 200)
        ready = call(running.port, "GET", "/ready")
        assert ready.status == 503 and ready.json["status"] == "starting"
        assert call(running.port, "GET", "/plan").status == 503
        early = call(running.port, "POST", CHAT, chat_body("x"))
        assert (early.status, early.json["error"]["code"]) == (503, "loading")
        children = descendants(running.process.pid)
        assert running.stop() == 0
        assert eventually(lambda: not any(map(is_alive, children)))


def _status(running: Running, path: str) -> int:
    try:
        return call(running.port, "GET", path).status
    except OSError:
        return 0


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "serve_fake.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _run(str(port))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and str(port) in done.stderr and "--port" in done.stderr


def test_engine_that_refuses_or_dies_at_start() -> None:
    refused = _run("0", "--", "--refuse")
    assert refused.returncode == 1
    assert refused.stderr.strip() == "Nothing fits. Lower --context."
    died = _run("0", "--", "--die-at-start")
    assert died.returncode == 1
    assert "status 7" in died.stderr and "'weights'" in died.stderr


def test_idle_streams_get_comments() -> None:
    with fake_server(["--keep-alive", "0.4"], ["--deaf"]) as running:
        response = open_stream(running, "silence", max_tokens=5)
        assert response.status == 200
        assert [response.readline() for _ in range(4)] == [b": keep-alive\n", b"\n"] * 2
        response.connection.close()  # type: ignore[attr-defined]
        response.close()
        assert eventually(lambda: running.cancelled() == 1)


def test_an_engine_that_computes_nothing_is_not_ready() -> None:
    with fake_server(["--stall", "0.5"], ["--deaf"]) as running:
        time.sleep(0.6)
        assert call(running.port, "GET", "/ready").status == 200  # idle is ready
        connection = http.client.HTTPConnection("127.0.0.1", running.port)
        body = json.dumps(chat_body("silence"))
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        assert eventually(lambda: call(running.port, "GET", "/ready").status == 503)
        ready = call(running.port, "GET", "/ready").json
        assert ready["status"] == "stalled" and ready["silent_s"] > 0.5
        assert call(running.port, "GET", "/health/live").status == 200
        connection.close()
        assert eventually(lambda: call(running.port, "GET", "/ready").status == 200)


def test_silence_counts_from_the_first_request() -> None:
    """Time is moved by hand: not from when the engine was heard last."""
    client = SimpleNamespace(alive=True, last_heard=time.monotonic() - 7200)
    state = ServerState(ServerConfig(("m",), stall_s=3600.0), client, None, None)  # type: ignore[arg-type]
    state.info = SimpleNamespace()  # type: ignore[assignment]
    assert state.status == "ready"
    state.opened(1)
    assert state.status == "ready" and 0 <= state.silent_s < 3600
    state.busy_since -= 7200
    assert state.status == "stalled"
    client.last_heard = time.monotonic()
    assert state.status == "ready"
