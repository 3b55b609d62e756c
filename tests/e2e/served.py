"""A real server as a process of its own, on a port that it takes itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

START_S = 240.0


@dataclass
class Server:
    """`log`: what it writes to standard error, its engine's lines among them."""

    process: subprocess.Popen[bytes]
    base: str
    log: Path

    def engine(self) -> int:
        """Process id of the engine, found by its command line below the server."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                engine = any(
                    word.endswith(("engine.process", "faulty_engine.py")) for word in words
                )
                if engine and not any("guardian" in word or word == "/bin/sh" for word in words):
                    return child.pid
        raise AssertionError("no engine process")

    def metric(self, name: str) -> float:
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Values out of one page, so of one moment."""
        page = httpx.get(f"{self.base}/metrics", timeout=120).text
        found = [re.search(rf"^{n}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE) for n in names]
        assert all(found), f"no metric {names} in:\n{page}"
        return [float(value[1]) for value in found if value]


@contextlib.contextmanager
def served(
    command: Sequence[str],
    folder: Path,
    *,
    errors: int | None = None,
    environ: Mapping[str, str] = {},
) -> Iterator[Server]:
    """`command` with ``--port 0 --json``, once it says where it listens: it is ready then.

    `errors`: where standard error goes, else into a file of `folder`.
    """
    said, log = folder / "ready.json", folder / "log"
    with said.open("wb") as out, log.open("wb") as err:
        process = subprocess.Popen(
            [*command, "--port", "0", "--json"],
            stdout=out,
            stderr=err if errors is None else errors,
            env=os.environ | environ,
        )
    try:
        up = eventually(lambda: said.read_text().endswith("\n") or ended(process), START_S)
        assert up and not ended(process), log.read_text()
        yield Server(process, json.loads(said.read_text())["url"], log)
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def eventually(test: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether `test` comes true; `seconds` is for a machine that has a lot else to do."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if test():
            return True
        time.sleep(0.05)
    return test()
