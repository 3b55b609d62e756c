"""200 streams at once through one server: is every token there, and what does the server cost?

    python benchmarks/server_load.py [--streams 200] [--tokens 200] [--model random:tiny-llama]

First over the tests' fake engine, which gives each stream a token every STEP ms and writes down
when. Every stream's text must be the engine's own, to the letter. The overhead of a token is the
time from the engine's handing over a step's results to the arrival of the token's bytes in another
process: it holds both processes' turns at the processor and the wait behind the other streams'
tokens of the same step; over all tokens, and over the steps in which all streams run (the others
are beside the admission of 200 requests at once). `server_cpu_us_per_token`: the server's own
processor time. `loop`: what single turns of its event loop cost (asyncio's own loop), also in
processor time, which other work on the machine does not change: a turn takes in one step's results,
or wakes one stream.

Then over the engine itself with MODEL: the tokens that each stream carries (with their
log-probabilities), its usage, and the engine's own count must agree.
Prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests" / "server"
sys.path.insert(0, str(TESTS))

from fake_engine import reply_text  # noqa: E402
from fake_server import call, chat_body, fake_server  # noqa: E402
from measure_overhead import cpu_seconds  # noqa: E402

from metainfer.bench.conditions import commit  # noqa: E402

CHAT = "/v1/chat/completions"
Arrival = tuple[float, bytes]


async def read_stream(port: int, body: dict[str, Any]) -> list[Arrival]:
    """What arrived when, on the clock of `time.monotonic`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    found: list[Arrival] = []
    while part := await reader.read(1 << 16):
        found.append((time.monotonic(), part))
    writer.close()
    return found


async def read_all(port: int, bodies: list[dict[str, Any]]) -> list[list[Arrival]]:
    return await asyncio.gather(*(read_stream(port, body) for body in bodies))


def client(port: int, bodies: list[dict[str, Any]]) -> list[list[Arrival]]:
    """All streams in a process of their own, so that their reading costs us nothing."""
    code = (
        "import asyncio, json, sys; sys.path.insert(0, sys.argv[1]); import server_load as s\n"
        "port, bodies = json.load(sys.stdin)\n"
        "found = asyncio.run(s.read_all(port, bodies))\n"
        "print(json.dumps([[(at, part.decode()) for at, part in stream] for stream in found]))"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    done = subprocess.run(
        command, input=json.dumps([port, bodies]), capture_output=True, text=True, check=True
    )
    streams = json.loads(done.stdout)
    return [[(at, part.encode()) for at, part in stream] for stream in streams]


def events(arrivals: list[Arrival]) -> Iterator[tuple[float, Any]]:
    """Each event with the time at which its last byte arrived; ``[DONE]`` stays text."""
    text = b""
    for at, part in arrivals:
        text += part
        *whole, text = text.split(b"\n\n")
        for block in whole:
            found = re.search(rb"data: (.*)", block)
            if found:
                data = found[1].decode()
                yield at, data if data.startswith("[") else json.loads(data)


def percentiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {
        name: round(1e3 * values[min(int(len(values) * part), len(values) - 1)], 3)
        for name, part in (("p50_ms", 0.5), ("p99_ms", 0.99), ("p999_ms", 0.999), ("max_ms", 1.0))
    }


def turns(streams: int, tokens: int, step_ms: float) -> dict[str, Any]:
    """The turns of the server's loop for the same streams, in its own processor time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turns.json"
        engine = ["--step-ms", str(step_ms)]
        with fake_server(["--turns", str(path)], engine, program="serve_turns.py") as running:
            bodies = [
                chat_body(f"stream {n}", stream=True, max_tokens=tokens) for n in range(streams)
            ]
            client(running.port, bodies)
            running.stop()
        found: dict[str, Any] = json.loads(path.read_text())
    return {**found, "turns_per_token": round(found["turns"] / (streams * tokens), 3)}


def over_fake(streams: int, tokens: int, step_ms: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        stamps = Path(folder) / "stamps.json"
        engine = ["--step-ms", str(step_ms), "--stamps", str(stamps)]
        with fake_server(engine=engine) as running:
            bodies = [
                chat_body(f"stream {n}", stream=True, max_tokens=tokens) for n in range(streams)
            ]
            client(running.port, bodies[:20])  # warm
            begin = cpu_seconds(running.process.pid)
            found = client(running.port, bodies)
            used = cpu_seconds(running.process.pid) - begin
            running.stop()
        kept = json.loads(stamps.read_text())
    delays: dict[int, list[float]] = {}
    firsts, wrong, lost = [], 0, 0
    for number, arrivals in enumerate(found):
        rows = list(events(arrivals))
        texts = [
            (at, event["choices"][0]["delta"].get("content"), event["id"])
            for at, event in rows
            if isinstance(event, dict) and event["choices"]
        ]
        texts = [row for row in texts if row[1]]
        said = "".join(text for _, text, _ in texts)
        wanted = reply_text(f"user: stream {number}\nassistant: ", tokens)
        wrong += said != wanted
        lost += tokens - len(said) + (rows[-1][1] != "[DONE]")
        first = kept["first"][next(name for name in kept["first"] if name.startswith(texts[0][2]))]
        if len(texts) == tokens:  # one event a token: none was held back
            firsts.append(first)
            for step, (at, _, _) in enumerate(texts, start=first):
                delays.setdefault(step, []).append(at - kept["times"][step])
    full = range(max(firsts) + 10, min(firsts) + tokens)
    waits = [delay for step in full for delay in delays[step]]
    return {
        "engine": f"fake, a token per stream every {step_ms:g} ms",
        "streams": streams,
        "tokens_per_stream": tokens,
        "streams_with_another_text": wrong,
        "tokens_lost": lost,
        "overhead_per_token_all_running": {**percentiles(waits), "n": len(waits)},
        "overhead_per_token": percentiles([d for found in delays.values() for d in found]),
        "server_cpu_us_per_token": round(1e6 * used / (streams * tokens), 1),
    }


@contextmanager
def serving(model: str, streams: int) -> Iterator[int]:
    command = [sys.executable, "-m", "metainfer", "serve", model, "--port", "0", "--json"]
    command += ["--concurrency", str(streams), "--chunk-tokens", str(max(streams, 512))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        yield int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
    finally:
        process.terminate()
        process.wait()


def counted(port: int) -> int:
    page = call(port, "GET", "/metrics").raw.decode()
    found = re.search(r"^metainfer_generated_tokens_total\S* (\S+)$", page, re.MULTILINE)
    return int(float(found[1])) if found else -1


def over_engine(model: str, streams: int, tokens: int) -> dict[str, Any]:
    with serving(model, streams) as port:
        name = call(port, "GET", "/v1/models").json["data"][0]["id"]
        extra: dict[str, Any] = {
            "stream": True, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        bodies = [{**chat_body(f"stream {n} of many", **extra), "model": name}
                  for n in range(streams)]  # fmt: skip
        before, begin = counted(port), time.monotonic()
        found = client(port, bodies)
        seconds = time.monotonic() - begin
        engine = counted(port) - before
    carried, usage, ended = [], 0, 0
    for arrivals in found:
        rows = [event for _, event in events(arrivals)]
        ended += rows[-1] == "[DONE]"
        carried.append(0)
        for event in rows[:-1]:
            usage += (event.get("usage") or {}).get("completion_tokens", 0)
            for choice in event["choices"]:
                carried[-1] += len((choice.get("logprobs") or {}).get("content") or ())
    return {
        "model": model,
        "streams": streams,
        "tokens_per_stream": tokens,
        "streams_ended": ended,
        "streams_short": sum(count != tokens for count in carried),
        "tokens": {"asked": streams * tokens, "carried": sum(carried), "usage": usage,
                   "engine_counted": engine},
        "tokens_lost": streams * tokens - sum(carried),
        "tok_s": round(sum(carried) / seconds, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--model-tokens", type=int, default=32)
    parser.add_argument("--conditions", default="an idle machine")
    options = parser.parse_args()
    document = {
        "benchmark": "server_load",
        "command": "python benchmarks/server_load.py " + " ".join(sys.argv[1:]),
        "conditions": {
            "commit": commit(),
            "cores": os.cpu_count(),
            "machine": options.conditions,
            "load_before": [round(value, 2) for value in os.getloadavg()],
        },
        "fake": over_fake(options.streams, options.tokens, options.step_ms),
        "loop": turns(options.streams, options.tokens, options.step_ms),
        "engine": [
            over_engine(model, options.streams, options.model_tokens) for model in options.model
        ],
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
