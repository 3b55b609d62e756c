"""A hundred streams at once lose nothing and mix nothing."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fake_engine import reply_text
from fake_server import Running, chat_body, events, fake_server


@pytest.mark.parametrize("per_step", [1, 3])
def test_a_hundred_concurrent_streams(per_step: int) -> None:
    with fake_server(engine=["--tokens-per-step", str(per_step)]) as running:
        asyncio.run(_hundred(running))


async def _hundred(running: Running) -> None:
    limits = httpx.Limits(max_connections=120)
    async with httpx.AsyncClient(base_url=running.url, limits=limits, timeout=240) as client:

        async def one(number: int) -> None:
            count = 40 + number
            body = chat_body(
                f"stream {number}",
                stream=True,
                max_tokens=count,
                seed=number,
                stream_options={"include_usage": True},
            )
            raw = (await client.post("/v1/chat/completions", json=body)).content
            *chunks, usage, done = events(raw)
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert text == reply_text(f"user: stream {number}\nassistant: ", count, number)
            assert len({chunk["id"] for chunk in chunks}) == 1
            assert usage["usage"]["completion_tokens"] == count
            assert done == "[DONE]"

        await asyncio.gather(*(one(number) for number in range(100)))


def test_more_than_a_thousand_queued_messages() -> None:
    """A socket with its default high-water mark drops or blocks here."""
    with fake_server(["--max-pending", "3000"]) as running:
        asyncio.run(_burst(running))


async def _burst(running: Running) -> None:
    async with httpx.AsyncClient(base_url=running.url, timeout=240) as client:
        body = {"model": "fake", "prompt": [f"p{i}" for i in range(125)], "n": 16, "max_tokens": 2}
        answer = (await client.post("/v1/completions", json=body)).json()
    assert len(answer["choices"]) == 2000
    assert answer["usage"]["completion_tokens"] == 4000
    assert answer["choices"][1999]["text"] == reply_text("p124", 2)
