"""The real server over the real engine, as two processes, on a tiny random model.

What a fake engine cannot show: that tokens come through exactly, that neither process outlives the
other. `test_supervision` has what a leaving client gives back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from harness import ask, start
from served import Server, served

from metainfer.core.request import SamplingParams

MODEL = "random:tiny-llama"


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "metainfer.cli.main", "serve", MODEL, "--threads", "1", *flags]
    with tempfile.TemporaryDirectory() as folder, served(command, Path(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--concurrency", "16") as running:
        yield running


def test_hundred_streams_lose_nothing(server: Server) -> None:
    """Each stream's text is what the same engine says in this process, one at a time."""
    prompts = [[3 + (7 * i + j) % 250 for j in range(5 + i % 23)] for i in range(100)]
    engine = start(MODEL, concurrency=1, prefix_cache=False)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    expected = [ask(engine, [p], params, audit=False)[0].tokens for p in prompts]

    async def one(client: openai.AsyncOpenAI, prompt: list[int]) -> tuple[list[str], int]:
        stream = await client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=24,
            temperature=0,
            stream=True,
            logprobs=0,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        tokens, usage = [], 0
        async for chunk in stream:
            if chunk.usage is not None:
                usage = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.logprobs is not None:
                    tokens += choice.logprobs.tokens or []
        return tokens, usage

    async def every() -> list[tuple[list[str], int]]:
        async with openai.AsyncOpenAI(base_url=f"{server.base}/v1", api_key="x") as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    answers = asyncio.run(every())
    texts = {}
    for wanted, (tokens, usage) in zip(expected, answers, strict=True):
        assert usage == len(wanted) == len(tokens) == 24
        # The same id is always shown as the same text, so equal sequences show equal texts.
        for token, text in zip(wanted, tokens, strict=True):
            assert texts.setdefault(token, text) == text
    assert len(texts) > 20


def test_times_and_memory_of_a_real_engine_reach_the_page(server: Server) -> None:
    """The fake engine cannot show that the scheduler's wait and the bytes held come through."""
    before = server.metric("metainfer_request_queue_seconds_count")
    client = openai.OpenAI(base_url=f"{server.base}/v1", api_key="x", max_retries=0)
    client.completions.create(model=MODEL, prompt=[5] * 9, max_tokens=4)
    assert server.metric("metainfer_request_queue_seconds_count") == before + 1
    assert server.metric("metainfer_request_prefill_seconds_count") == before + 1
    page = httpx.get(f"{server.base}/page/status").json()
    pools = {pool["pool"]: pool for pool in page["memory"]}
    for name in ("weights", "kv"):
        assert pools[name]["planned_bytes"] == pools[name]["held_bytes"] > 0
    assert pools["transient"]["held_bytes"] is None
    assert page["links"] == [] and page["alarms"] == []
    assert sum(page["ops"].values()) == page["ops"]["native"] > 0
    assert {"weights", "warm-up"} <= {phase["name"] for phase in page["start_phases"]}


def test_plan_is_the_plan(server: Server) -> None:
    plan = json.load(urllib.request.urlopen(f"{server.base}/plan"))
    ready = json.load(urllib.request.urlopen(f"{server.base}/ready"))
    assert plan["plan"]["model"]["reference"] == MODEL
    assert plan["plan"]["fingerprint"] in json.dumps(ready)
    assert plan["decisions"] and plan["ledger"]


def test_kill_of_the_engine_ends_a_server_without_restarts() -> None:
    with serving("--max-restarts", "0") as server:
        os.kill(server.engine(), signal.SIGKILL)
        assert server.process.wait(60) != 0


def test_kill_of_the_server_ends_the_engine() -> None:
    with serving() as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert family
        server.process.kill()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive, [child.cmdline() for child in alive]


def test_term_drains_running_answers() -> None:
    with serving() as server:
        body = {"model": MODEL, "prompt": [5] * 20, "max_tokens": 120, "stream": True}
        body["ignore_eos"] = True
        url = f"{server.base}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(60) == 0
