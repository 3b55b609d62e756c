"""A real server over the engine of `benchmarks/faulty_engine.py`, which takes faults on order."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from served import Server, eventually, served

from metainfer.core.env import cache_dir

ROOT = Path(__file__).parents[2]
MODEL = "random:tiny-llama"
TEXT = {"model": MODEL, "prompt": [5, 9, 11], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@dataclass
class Faulty(Server):
    """A server whose engine obeys orders: files in the folder `orders`."""

    orders: Path

    def health(self) -> dict[str, Any]:
        return httpx.get(f"{self.base}/health", timeout=120).json()  # type: ignore[no-any-return]

    def status(self) -> str:
        return str(self.health()["status"])

    def restarted(self) -> bool:
        return bool(self.health()["restarts"])

    def wait_ready(self) -> None:
        assert eventually(lambda: self.status() == "ready"), self.log.read_text()

    def order(self, fault: str) -> None:
        (self.orders / fault).touch()

    def withdraw(self, order: str) -> None:
        (self.orders / order).unlink()

    def complete(self, **changes: object) -> httpx.Response:
        return httpx.post(f"{self.base}/v1/completions", json=TEXT | changes, timeout=240)


def own_cache(folder: Path) -> Path:
    """A cache folder of its own for dumps, with what the usual one holds beside them."""
    usual, own = cache_dir(), folder / "cache"
    (own / "records").mkdir(parents=True)
    for path in usual.glob("*"):
        if path.name != "records":
            (own / path.name).symlink_to(path)
    for kind in (usual / "records").glob("*"):
        if kind.name != "flight":
            shutil.copytree(kind, own / "records" / kind.name, copy_function=_copy)
    return own


def _copy(source: str, target: str) -> None:
    """Others write records at the same time: a part of one may be gone again."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


@contextlib.contextmanager
def faulty(folder: Path, *flags: str, **how: Any) -> Iterator[Faulty]:
    """`how`: as of `served`."""
    orders = folder / "orders"
    orders.mkdir(parents=True)
    command = [sys.executable, str(ROOT / "benchmarks" / "serve_faulty.py"), str(orders)]
    command += ["serve", MODEL, "--threads", "1", *flags]
    with served(command, folder, **how) as running:
        yield Faulty(running.process, running.base, running.log, orders)
