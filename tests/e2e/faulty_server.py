"""A real server over the engine of `benchmarks/faulty_engine.py`, which takes faults on order."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from metainfer.core.env import cache_dir

ROOT = Path(__file__).parents[2]
MODEL = "random:tiny-llama"
TEXT = {"model": MODEL, "prompt": [5, 9, 11], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Faulty:
    """A server whose engine obeys orders, and what it wrote."""

    def __init__(
        self, folder: Path, *flags: str, out: int | None = None, environ: Mapping[str, str] = {}
    ) -> None:
        """`out`: where standard output and errors go, else into a file."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        self.orders = folder / "orders"
        self.orders.mkdir(parents=True)
        self.log = folder / "log"
        command = [sys.executable, str(ROOT / "benchmarks" / "serve_faulty.py"), str(self.orders)]
        command += ["serve", MODEL, "--port", str(port), "--threads", "1", *flags]
        with self.log.open("wb") as file:
            to = file if out is None else out
            env = os.environ | environ
            self.process = subprocess.Popen(command, stdout=to, stderr=to, env=env)

    def health(self) -> dict[str, Any]:
        return httpx.get(f"{self.base}/health", timeout=30).json()  # type: ignore[no-any-return]

    def status(self) -> str:
        with contextlib.suppress(httpx.HTTPError):
            return str(self.health()["status"])
        return "none"

    def restarted(self) -> bool:
        return bool(self.health()["restarts"])

    def wait_ready(self) -> None:
        assert eventually(lambda: self.status() == "ready"), self.log.read_text()

    def order(self, fault: str) -> None:
        (self.orders / fault).touch()

    def complete(self, **changes: object) -> httpx.Response:
        return httpx.post(f"{self.base}/v1/completions", json=TEXT | changes, timeout=120)

    def metric(self, name: str) -> float:
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Values out of one page, so of one moment."""
        page = httpx.get(f"{self.base}/metrics", timeout=30).text
        found = [re.search(rf"^{n}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE) for n in names]
        assert all(found), f"no metric {names}"
        return [float(value[1]) for value in found if value]

    def engine(self) -> int:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if any(word.endswith("faulty_engine.py") for word in words) and not any(
                    "guardian" in word or word == "/bin/sh" for word in words
                ):
                    return child.pid
        raise AssertionError("no engine process")


def own_cache(folder: Path) -> Path:
    """A cache folder of its own for dumps, with what the usual one holds beside them."""
    usual, own = cache_dir(), folder / "cache"
    (own / "records").mkdir(parents=True)
    for path in usual.glob("*"):
        if path.name != "records":
            (own / path.name).symlink_to(path)
    for kind in (usual / "records").glob("*"):
        if kind.name != "flight":
            shutil.copytree(kind, own / "records" / kind.name)
    return own


def eventually(test: Callable[[], bool], seconds: float = 120.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if test():
            return True
        time.sleep(0.05)
    return test()


@contextlib.contextmanager
def faulty(folder: Path, *flags: str, **how: Any) -> Iterator[Faulty]:
    server = Faulty(folder, *flags, **how)
    try:
        server.wait_ready()
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(20)
        server.process.kill()
        server.process.wait()
