"""Faults under load: what clients see, how long nobody is served, how many faults that allows.

    python benchmarks/fault_campaign.py [--model smollm2-135m] [--streams 4] [--hang-after 5]

A real server over an engine that takes faults on order (`faulty_engine.py`). Some clients stream
without end; when a stream ends or fails they begin anew, after `Retry-After` where it is given. One
fault after another: a row meets NaN, memory lacks once, a crowd of clients connects and leaves, the
engine is killed, a step hangs, a step hangs with the interpreter locked, the engine dies while its
log is a full disk and while its log is a pipe that nobody reads. For each: outcomes of the requests
that ended from the fault until all was well again, requests lost, seconds without readiness, the
longest pause between two tokens of streams that were open and went through it unharmed. Then how
many such faults a day leave 99.95 %, of time and of requests at this load, and how many of all
kinds in turn. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from metainfer.bench.conditions import commit
from metainfer.core.env import cache_dir

HERE = Path(__file__).parent
TARGET = 0.9995
DAY_S = 86400.0
CALM_S = 2.0
BASELINE_S = 15.0
READY_S = 240.0


@dataclass
class Stream:
    """One streamed request. `outcome`: ``finished`` or the error's status and code."""

    begun: float
    ended: float = 0.0
    outcome: str = ""
    tokens: list[float] = field(default_factory=list)
    wait_s: float = 0.25  # before the client tries again


class Server:
    """A server of its own, with its orders and its cache folder."""

    def __init__(self, options: argparse.Namespace, out: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fault-campaign-"))
        self.orders = self.folder / "orders"
        self.orders.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        command = [sys.executable, str(HERE / "serve_faulty.py"), str(self.orders), "serve"]
        command += [options.model, "--port", str(port), "--max-restarts", "99"]
        command += ["--hang-after", str(options.hang_after)]
        environ = os.environ | {"METAINFER_CACHE": str(self._cache())}
        self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environ)

    def _cache(self) -> Path:
        """The usual cache with other dumps."""
        own = self.folder / "cache"
        (own / "records").mkdir(parents=True)
        for path in cache_dir().glob("*"):
            if path.name != "records":
                (own / path.name).symlink_to(path)
        for kind in (cache_dir() / "records").glob("*"):
            if kind.name != "flight":
                shutil.copytree(kind, own / "records" / kind.name)
        return own

    def order(self, fault: str) -> None:
        (self.orders / fault).touch()

    def kill_engine(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if len(words) > 1 and words[1].endswith("faulty_engine.py"):
                    child.kill()

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Load:
    """Clients that stream without end; every stream is kept."""

    def __init__(self, client: httpx.AsyncClient, model: str, streams: int) -> None:
        self._client, self._model = client, model
        self.streams: list[Stream] = []
        self._tasks = [asyncio.ensure_future(self._go_on(i)) for i in range(streams)]

    async def _go_on(self, number: int) -> None:
        turn = 0
        while True:
            turn += 1
            stream = Stream(time.monotonic())
            self.streams.append(stream)
            stream.outcome = await self.one(stream, [7 + number, 11 + turn % 200, 13])
            stream.ended = time.monotonic()
            if stream.outcome != "finished":
                await asyncio.sleep(stream.wait_s)

    async def one(self, stream: Stream, prompt: list[int]) -> str:
        body = {"model": self._model, "prompt": prompt, "max_tokens": 48, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True}
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    error = json.loads(await answer.aread())["error"]
                    stream.wait_s = float(answer.headers.get("retry-after", stream.wait_s))
                    return f"{answer.status_code} {error['code']}"
                last = ""
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        last = line.removeprefix("data: ")
                        stream.tokens.append(time.monotonic())
                if last == "[DONE]":
                    return "finished"
                return f"event {json.loads(last)['error']['code']}" if last else "cut"
        except httpx.HTTPError as error:
            return type(error).__name__

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health/ready")).status_code == 200
    except httpx.HTTPError:
        return False


async def wait_ready(client: httpx.AsyncClient) -> None:
    until = time.monotonic() + READY_S
    while not await ready(client):
        if time.monotonic() > until:
            raise SystemExit("the server is not ready in time")
        await asyncio.sleep(0.05)


async def trial(
    client: httpx.AsyncClient,
    load: Load,
    inject: Callable[[], Awaitable[None] | None],
    wait_s: float,
) -> dict[str, Any]:
    """Calm, the fault, `wait_s` seconds in which it may show, readiness, calm."""
    await asyncio.sleep(CALM_S)
    begun = time.monotonic()
    done = inject()
    if done is not None:
        await done
    first, last = 0.0, 0.0
    shown = time.monotonic() + wait_s
    while time.monotonic() < shown or (last and not await ready(client)):
        if await ready(client):
            await asyncio.sleep(0.02)
            continue
        first = first or time.monotonic()
        await wait_ready(client)
        last = time.monotonic()
    while any(not stream.ended for stream in load.streams if stream.begun <= begun):
        await asyncio.sleep(0.05)
    end = time.monotonic()
    within = [s for s in load.streams if s.outcome and begun <= s.ended <= end]
    lost = [s for s in within if s.outcome != "finished"]
    gaps = [
        later - earlier
        for s in within
        if s.outcome == "finished" and s.begun <= begun
        for earlier, later in zip(s.tokens, s.tokens[1:], strict=False)
        if later >= begun
    ]
    return {
        "outcomes": dict(Counter(s.outcome for s in within)),
        "lost": len(lost),
        "lost_in_flight": sum(s.begun <= begun for s in lost),
        "not_ready_s": round(last - begun, 3) if last else 0.0,
        "noticed_after_s": round(first - begun, 3) if first else None,
        "longest_pause_of_others_s": round(max(gaps, default=0.0), 3),
        "others": len({id(s) for s in within if s.outcome == "finished" and s.begun <= begun}),
    }


async def storm(client: httpx.AsyncClient, model: str, clients: int) -> None:
    """Clients that ask for much and leave, half of them before any answer."""

    async def leave(number: int) -> None:
        body = {"model": model, "prompt": [5, 6, number % 200 + 7], "max_tokens": 200}
        body |= {"stream": True, "ignore_eos": True}
        with contextlib.suppress(httpx.HTTPError, asyncio.TimeoutError):
            async with asyncio.timeout(0.05 if number % 2 else 1.0):
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        return

    await asyncio.gather(*(leave(number) for number in range(clients)))


async def baseline(load: Load) -> float:
    """Requests a second that end well while nothing is wrong."""
    await asyncio.sleep(CALM_S)
    begun = time.monotonic()
    await asyncio.sleep(BASELINE_S)
    return sum(s.outcome == "finished" and s.ended > begun for s in load.streams) / BASELINE_S


async def campaign(options: argparse.Namespace, out: Any, faults: dict[str, Any]) -> dict[str, Any]:
    server = Server(options, out)
    found: dict[str, Any] = {}
    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(base_url=server.base, timeout=120, limits=limits) as client:
            await wait_ready(client)
            load = Load(client, options.model, options.streams)
            rate = await baseline(load)
            for name, (inject, wait_s) in faults.items():
                found[name] = await trial(client, load, lambda i=inject: i(server, client), wait_s)
                found[name]["requests_per_s"] = round(rate, 3)
                print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
            await load.close()
    finally:
        server.close()
    return found


def allowed(row: dict[str, Any]) -> dict[str, Any]:
    """Faults a day at which 99.95 % holds: of time, and of requests at the load that was seen."""
    down, lost, rate = row["not_ready_s"], row["lost"], row["requests_per_s"]
    return {
        "by_time": round((1 - TARGET) * DAY_S / down, 2) if down else None,
        "by_requests": round((1 - TARGET) * DAY_S * rate / lost, 2) if lost else None,
    }


def full_pipe() -> tuple[int, int]:
    """A pipe without room: its reading end, its writing end."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    return reading, writing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--hang-after", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=200)
    options = parser.parse_args()
    hang = 2 * options.hang_after + 2
    rows: dict[str, Any] = {}
    ordered: dict[str, Any] = {
        "nan": (lambda s, c: s.order("nan"), 2.0),
        "out_of_memory": (lambda s, c: s.order("oom"), 2.0),
        "client_storm": (lambda s, c: storm(c, options.model, options.clients), 2.0),
        "engine_killed": (lambda s, c: s.kill_engine(), 2.0),
        "step_hangs": (lambda s, c: s.order("hang"), hang),
        "step_hangs_locked": (lambda s, c: s.order("lock"), hang),
    }
    rows |= asyncio.run(campaign(options, subprocess.DEVNULL, ordered))
    dies: dict[str, Any] = {"engine_dies_log_disk_full": (lambda s, c: s.order("raise"), 2.0)}
    with open("/dev/full", "wb") as full:
        rows |= asyncio.run(campaign(options, full, dies))
    reading, writing = full_pipe()
    dies = {"engine_dies_log_pipe_full": (lambda s, c: s.order("raise"), 2.0)}
    rows |= asyncio.run(campaign(options, writing, dies))
    os.close(reading)
    os.close(writing)
    for row in rows.values():
        row["faults_a_day_at_99.95"] = allowed(row)
    down = [row["not_ready_s"] for row in rows.values()]
    lost = sum(row["lost"] for row in rows.values())
    rates = [row["requests_per_s"] for row in rows.values()]
    budget = (1 - TARGET) * DAY_S
    mixed = {
        "by_time": round(budget / (sum(down) / len(down)), 2) if sum(down) else None,
        "by_requests": round(budget * sum(rates) / lost, 2) if lost else None,
    }
    document = {
        "command": " ".join(["python", "benchmarks/fault_campaign.py", *sys.argv[1:]]),
        "commit": commit(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "options": vars(options),
        "budget_s_a_day": round(budget, 2),
        "faults": rows,
        "mixed_faults_a_day_at_99.95": mixed,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
