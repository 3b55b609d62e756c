"""B-36: a measurement that cannot flatter, against servers that try to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from metainfer.bench.client import Server, server_at
from metainfer.bench.serve import ServeOptions, contaminated, measure, medians
from metainfer.core.errors import RefusedError, UserError
from metainfer.simulator.outcome import Served
from metainfer.simulator.workload import draw

PLAN = {
    "plan": {
        "model": {"reference": "fake", "vocab_size": 500},
        "machine": "m", "device": "d", "threads": 1, "fingerprint": "f", "prefix_cache": True,
        "limits": {"max_context": 4096}, "draft": {"method": "off"}, "ops": {},
    }
}  # fmt: skip


NAME = '{model_name="fake"}'


@dataclass
class Fake:
    """A server with a prefix cache, several tokens in a message, and company on demand.

    `chunk`: tokens of each message. `busy`: requests of others that it reports. `leak`: tokens of
    others that it generates beside each of ours. `reuse`: cached tokens it finds in any prompt.
    """

    chunk: int = 1
    busy: int = 0
    leak: int = 0
    reuse: int = 0
    broken: bool = False
    short: int = 0
    steps: int = 0
    generated: int = 0
    prompts: list[list[int]] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path, size = head.split()[1], 0
        for line in head.splitlines():
            if line.lower().startswith("content-length:"):
                size = int(line.partition(":")[2])
        body = json.loads(await reader.readexactly(size)) if size else {}
        if path == "/v1/completions":
            await self._stream(writer, body)
        else:
            pages: dict[str, Callable[[], str]] = {
                "/plan": lambda: json.dumps(PLAN),
                "/v1/models": lambda: json.dumps({"data": [{"id": "fake"}]}),
                "/metrics": self._metrics,
            }
            text = pages[path]().encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
        await writer.drain()
        writer.close()

    def _metrics(self) -> str:
        return (
            f"# HELP x y\nmetainfer_requests_running{NAME} {self.busy}\n"
            f"metainfer_requests_waiting{NAME} 0\nmetainfer_engine_steps_total{NAME} {self.steps}\n"
            f"metainfer_generated_tokens_total{NAME} {self.generated}\n"
            'metainfer_other_total{model_name="fake",reason="a"} 3\n'
        )

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.prompts.append(body["prompt"])
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        done, wanted = 0, body["max_tokens"] - self.short
        self.generated += self.leak
        while done < wanted:
            count = min(self.chunk, wanted - done)
            done, self.steps, self.generated = done + count, self.steps + 1, self.generated + count
            usage = {
                "completion_tokens": done,
                "prompt_tokens_details": {"cached_tokens": self.reuse},
            }
            data = f"data: {json.dumps({'choices': [{'text': 'x'}], 'usage': usage})}\n\n".encode()
            for piece in (data[:7], data[7:]):  # an event may be cut anywhere
                writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
                await writer.drain()
        if not self.broken:
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


@asynccontextmanager
async def running(fake: Fake) -> AsyncIterator[Server]:
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    try:
        yield Server("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()


def measured(fake: Fake, workload: str, **options: Any) -> dict[str, Any]:
    async def go() -> dict[str, Any]:
        async with running(fake) as server:
            return await measure(server, ServeOptions(workload=workload, **options), lambda _: None)

    return asyncio.run(go())


CLOSED = "closed:concurrency=2,requests=4,prompt=20,output=12"


def test_b36_tokens_are_counted_by_usage_not_by_messages() -> None:
    found = measured(Fake(chunk=5), CLOSED)
    run = found["runs"][0]
    assert run["output_tokens"] == 48 and run["steps"] == 12
    assert run["tokens_per_forward"] == 4.0 and not run["contaminated"]
    assert found["n"] == 3 and set(found["spread"]) >= {"output_tok_s", "ttft_s.p95"}
    assert found["conditions"]["text_class"] == "random token ids"
    assert {"commit", "load_average", "plan", "limits", "warm_up"} <= set(found["conditions"])


def test_b36_no_two_prompts_begin_alike() -> None:
    fake = Fake()
    measured(fake, CLOSED)
    heads = {tuple(prompt[:8]) for prompt in fake.prompts}
    assert len(heads) == len(fake.prompts) == 2 + 3 * 4
    assert measured(Fake(), CLOSED)["runs"][1]["seed"] == 1


def test_b36_a_busy_server_is_not_measured() -> None:
    with pytest.raises(RefusedError, match="3 other requests"):
        measured(Fake(busy=3), CLOSED)


def test_b36_cold_rows_with_cached_tokens_are_refused() -> None:
    with pytest.raises(RefusedError, match="80 prompt tokens of cold requests"):
        measured(Fake(reuse=20), CLOSED)
    shared = "shared:concurrency=1,requests=2,prefix=30,groups=1,prompt=4,output=3"
    assert measured(Fake(reuse=20), shared)["n"] == 3  # there it is the point


def test_b36_tokens_of_others_spoil_a_row() -> None:
    with pytest.raises(RefusedError, match="generated 56 tokens, 48 of them ours"):
        measured(Fake(leak=2), CLOSED)


@pytest.mark.parametrize(
    ("fake", "said"),
    [(Fake(broken=True), "4 requests failed: the stream broke off"), (Fake(short=1), "as long as")],
)
def test_b36_an_answer_that_is_not_whole_spoils_a_row(fake: Fake, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        measured(fake, CLOSED)


def test_b36_a_server_that_hides_its_cache_is_not_compared() -> None:
    workload = draw(CLOSED, 500)
    served = [Served(0.0, 20, [1.0], [job.output]) for job in workload.jobs]
    assert contaminated(workload, served, 48) == [
        "the server does not say how many prompt tokens were cached"
    ]


def test_what_http_cannot_carry_and_what_does_not_fit() -> None:
    with pytest.raises(RefusedError, match="which HTTP does not return"):
        measured(Fake(), "agentic:concurrency=1,turns=2,prompt=20,step=5,output=3")
    with pytest.raises(RefusedError, match="the server's context is 4096"):
        measured(Fake(), "closed:concurrency=1,requests=1,prompt=4090,output=10")


def test_medians_and_half_the_range() -> None:
    runs = [{"output_tok_s": rate, "ttft_s": {"p50": rate / 100}} for rate in (90.0, 100.0, 130.0)]
    found = medians(runs)
    assert found["measured"] == {"output_tok_s": 100.0, "ttft_s": {"p50": 1.0}}
    assert found["spread"]["output_tok_s"] == pytest.approx(0.2)


@pytest.mark.parametrize("url", ["https://a:1", "http://", "a:8000", "http://a:x"])
def test_a_bad_url_is_told(url: str) -> None:
    with pytest.raises(UserError, match=r"is no URL of a server\. Write http://HOST:PORT"):
        server_at(url)
    assert server_at("http://a:9/root/") == Server("a", 9, "/root")


def test_nobody_answers() -> None:
    server = server_at("http://127.0.0.1:9")
    with pytest.raises(UserError, match="no server answers"):
        asyncio.run(measure(server, ServeOptions(workload=CLOSED), lambda _: None))
