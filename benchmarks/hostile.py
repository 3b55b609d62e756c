"""Hostile requests against a real server: no 5xx, no stall of others, no growth of memory.

    python benchmarks/hostile.py [--requests 10000] [--seed 1] [--at-once 12] [--out FILE]

The server runs over the tests' fake engine, which gives a token every 20 ms. A well-behaved client
in a process of its own streams all the time and keeps the gaps between its events: first alone,
then beside the attack. `loop`: the longest turns of the server's event loop under a tenth of the
attack in its own processor time, which other work on the machine does not change. Memory is the
server's resident size (with its checking process), after each tenth of the requests and at the end,
when nothing is pending: it may rise to what the largest bodies at once need, and must stay there.
Prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests" / "server"
sys.path.insert(0, str(TESTS))

from fake_server import Running, call, chat_body, descendants, eventually, fake_server  # noqa: E402
from hostile_client import Outcome, send  # noqa: E402
from hostile_requests import attacks  # noqa: E402

from metainfer.bench.conditions import commit  # noqa: E402

STEP_MS = 20.0

WATCHER = """
import http.client, json, sys, time
sys.path.insert(0, sys.argv[2])
from fake_server import chat_body
body = json.dumps(chat_body("mind your own", stream=True, max_tokens=1500))
gaps, streams, broken, until = [], 0, 0, time.monotonic() + float(sys.argv[3])
print("up", flush=True)
while time.monotonic() < until:
    link = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    link.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer, last, end, line = link.getresponse(), 0.0, False, b"x"
    while line and not end:
        line = answer.readline()
        now = time.perf_counter()
        if line.startswith(b"data: "):
            if last:
                gaps.append(now - last)
            last, end = now, b"[DONE]" in line
        if time.monotonic() > until:
            end = True
    streams, broken = streams + 1, broken + (not end)
    link.close()
gaps.sort()
at = lambda part: gaps[min(int(len(gaps) * part), len(gaps) - 1)]
print(json.dumps({"events": len(gaps), "streams": streams, "broken": broken,
    "median_ms": 1e3 * at(0.5), "p99_ms": 1e3 * at(0.99), "p999_ms": 1e3 * at(0.999),
    "longest_ms": 1e3 * gaps[-1], "over_100_ms": sum(gap > 0.1 for gap in gaps)}))
"""


class Watcher:
    """The well-behaved client."""

    def __init__(self, port: int, seconds: float) -> None:
        command = [sys.executable, "-c", WATCHER, str(port), str(TESTS), str(seconds)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def result(self) -> dict[str, Any]:
        shown, _ = self._process.communicate()
        return {name: round(value, 2) for name, value in json.loads(shown).items()}


def resident(pid: int) -> int:
    """Bytes of a process that are in memory; 0 when it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def turns(options: argparse.Namespace) -> dict[str, Any]:
    """What the loop's turns cost under the first tenth of the attack, in processor time."""
    wanted = attacks(options.seed, max(options.requests // 10, 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turns.json"
        engine = ["--step-ms", str(STEP_MS)]
        with fake_server(["--turns", str(path)], engine, program="serve_turns.py") as running:
            asyncio.run(send(running.port, wanted, options.at_once))
            running.stop()
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def memory(running: Running) -> dict[str, float]:
    """MiB of the server and of its checking process, by what they are."""
    below = [pid for pid in descendants(running.process.pid) if pid != running.engine]
    return {
        "server": round(resident(running.process.pid) / 2**20, 1),
        "children": round(sum(map(resident, below)) / 2**20, 1),
        "engine": round(resident(running.engine) / 2**20, 1),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    wanted = attacks(options.seed, options.requests)
    first = max(options.requests // 10, 1)
    with fake_server(engine=["--step-ms", str(STEP_MS)]) as running:
        alone = Watcher(running.port, options.alone).result()
        warm = asyncio.run(send(running.port, wanted[:first], options.at_once))
        eventually(lambda: call(running.port, "GET", "/health").json["pending"] == 0, 60)
        series = [memory(running)]
        guess = warm.seconds / first * (len(wanted) - first)
        watcher = Watcher(running.port, max(guess * 0.8, 5.0))
        attack = Outcome()
        for begin in range(first, len(wanted), first):
            part = wanted[begin : begin + first]
            attack.add(asyncio.run(send(running.port, part, options.at_once)))
            series.append(memory(running))
        beside = watcher.result()
        calm = eventually(lambda: call(running.port, "GET", "/health").json["pending"] == 0, 60)
        series.append(memory(running))
        fine = call(running.port, "POST", "/v1/chat/completions", chat_body("say:ok")).status
    table: dict[str, dict[str, int]] = {}
    for (family, status), count in sorted((warm.statuses + attack.statuses).items()):
        table.setdefault(family, {})[str(status or "none")] = count
    return {
        "requests": len(wanted),
        "seconds": round(warm.seconds + attack.seconds, 1),
        "faults": warm.faults + attack.faults,
        "statuses": table,
        "stream_alone": alone,
        "stream_beside": beside,
        "memory_mib_after_each_tenth_and_at_end": series,
        "calm_at_end": calm,
        "answers_at_end": fine,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--alone", type=float, default=15.0, help="seconds of the stream alone")
    parser.add_argument("--conditions", default="an idle machine")
    options = parser.parse_args()
    load = os.getloadavg()
    begin = time.time()
    document = {
        "benchmark": "hostile",
        "command": "python benchmarks/hostile.py " + " ".join(sys.argv[1:]),
        "conditions": {
            "commit": commit(),
            "cores": os.cpu_count(),
            "machine": options.conditions,
            "load_before": [round(value, 2) for value in load],
            "engine": f"fake, a token every {STEP_MS:g} ms",
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
        },
        "loop": turns(options),
        **measure(options),
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
