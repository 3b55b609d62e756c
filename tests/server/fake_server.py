"""Server processes over the fake engine, and a small HTTP client with no opinions."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass
class Running:
    process: subprocess.Popen[str]
    url: str
    engine: int
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def release(self) -> None:
        """Let an engine with ``--hold-at`` go on."""
        self.log.with_name("release").touch()

    def cancelled(self) -> int:
        """Requests that the engine was told to drop."""
        return sum(line.startswith("cancel ") for line in self.lines())

    def submitted(self) -> int:
        """Requests that the engine was given."""
        return sum(line.startswith("submit ") for line in self.lines())

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextmanager
def fake_server(
    server: Sequence[str] = (),
    engine: Sequence[str] = (),
    *,
    ready: bool = True,
    port: int = 0,
    program: str = "serve_fake.py",
) -> Iterator[Running]:
    """A server of its own; `ready` waits for the engine. Killed at the end if still there."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "engine.log"
        command = [sys.executable, str(HERE / program), str(port), *server]
        command += ["--", "--log", str(log), "--release", str(log.with_name("release")), *engine]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            told: dict[str, Any] = {"url": "", "engine": -1}
            for _ in range(2 if ready else 1):
                line = process.stdout.readline()
                if not line:
                    break
                told = json.loads(line)
            yield Running(process, told["url"], told["engine"], log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


def call(
    port: int,
    method: str,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """One request; a dict is sent as JSON. Told to try again later, because a busy machine did not
    get to check a grammar in time, it does."""
    answer = _call(port, method, path, body, headers)
    until = time.monotonic() + 120
    while b"was not checked within" in answer.raw and time.monotonic() < until:
        time.sleep(1)
        answer = _call(port, method, path, body, headers)
    return answer


def _call(
    port: int,
    method: str,
    path: str,
    body: bytes | dict[str, Any] | None,
    headers: dict[str, str] | None,
) -> Answer:
    given = dict(headers or {})
    if body is not None and not any(name.lower() == "content-type" for name in given):
        given["Content-Type"] = "application/json"
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, data, given)
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, names, response.read())
    finally:
        connection.close()


def events(raw: bytes) -> list[Any]:
    """The data of each server-sent event; ``[DONE]`` stays text."""
    found = []
    for block in map(str.strip, raw.decode().split("\n\n")):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def chat_body(text: str, **extra: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **extra}


def eventually(test: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether `test` comes true; `seconds` is for a machine that has a lot else to do."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if test():
            return True
        time.sleep(0.02)
    return test()


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def descendants(pid: int) -> list[int]:
    """Process ids under `pid`."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def is_error_body(body: Any) -> bool:
    """Whether `body` is an error in OpenAI's form."""
    error = body.get("error") if isinstance(body, dict) else None
    return (
        isinstance(error, dict)
        and set(error) == {"message", "type", "param", "code"}
        and isinstance(error["message"], str)
        and bool(error["message"])
        and isinstance(error["type"], str)
        and isinstance(error["code"], str)
        and (error["param"] is None or isinstance(error["param"], str))
    )


def is_anthropic_error(body: Any) -> bool:
    """Whether `body` is an error in Anthropic's form."""
    error = body.get("error") if isinstance(body, dict) else None
    return (
        isinstance(error, dict)
        and body["type"] == "error"
        and set(body) == {"type", "error"}
        and set(error) == {"type", "message"}
        and isinstance(error["type"], str)
        and isinstance(error["message"], str)
        and bool(error["message"])
    )
