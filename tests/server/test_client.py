"""The engine's client: outputs, cancellation by leaving, refusals, death."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from contextlib import aclosing
from pathlib import Path

import pytest
from fake_engine import EOS, VOCAB, reply_text
from fake_server import eventually, is_alive

from metainfer.core.errors import RequestError, UserError
from metainfer.core.intent import Intent
from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.engine.client import ProcessClient
from metainfer.engine.protocol import EngineClient, Progress

FAKE = str(Path(__file__).with_name("fake_engine.py"))


def process_client(*flags: str, progress: list[Progress] | None = None) -> ProcessClient:
    listen = (lambda item: None) if progress is None else progress.append
    return ProcessClient(Intent(model="fake"), listen, command=[sys.executable, FAKE, *flags])


def request(name: str, count: int = 20, prompt: bytes = b"hello") -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=count), (EOS,))


async def text_of(client: EngineClient, name: str, count: int) -> str:
    letters = b""
    async for output in client.submit(request(name, count)):
        assert output.index == len(letters)
        letters += bytes(output.tokens)
    return letters.decode()


def test_streams_are_demultiplexed() -> None:
    async def go() -> None:
        client = process_client()
        assert not client.alive
        info = await client.start()
        assert (info.vocab_size, client.alive) == (VOCAB, True)
        counts = list(range(1, 30))
        texts = await asyncio.gather(*(text_of(client, str(n), n) for n in counts))
        assert texts == [reply_text("hello", n) for n in counts]
        assert client.stats.steps >= 29
        await client.close(drain=False, grace_s=5)
        assert not client.alive
        with pytest.raises(RequestError) as caught:
            await text_of(client, "late", 3)
        assert caught.value.code == "engine_dead"

    asyncio.run(go())


def test_leaving_cancels_and_finishing_does_not(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def go() -> None:
        client = process_client("--log", str(log), "--hold-at", "3")
        await client.start()
        await text_of(client, "finishes", 3)
        async for _ in client.submit(request("broken off", 2000)):
            break
        async with aclosing(client.submit(request("closed", 2000))) as outputs:
            await anext(outputs)
        task = asyncio.ensure_future(text_of(client, "task", 2000))
        await asyncio.sleep(0)  # it sends its request
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await asyncio.to_thread(eventually, lambda: log.read_text().count("cancel ") == 3)
        assert "cancel finishes" not in log.read_text()
        await client.close(drain=False, grace_s=5)

    asyncio.run(go())


def test_cancelling_by_id_ends_the_stream() -> None:
    async def go() -> None:
        client = process_client()
        await client.start()
        last = None
        async for output in client.submit(request("x", 2_000_000)):
            if last is None:
                await client.cancel(["x", "unknown"])
            last = output
        assert last is not None and last.finish is FinishReason.CANCELLED
        assert client.stats.running == 0  # no step follows that would say so
        await client.close(drain=False, grace_s=5)

    asyncio.run(go())


def test_refusal_reaches_its_stream_only() -> None:
    async def go() -> None:
        client = process_client("--max-running", "1", "--hold-at", "3")
        await client.start()
        other = asyncio.ensure_future(text_of(client, "fine", 50))
        await asyncio.sleep(0)  # it sends its request
        with pytest.raises(RequestError) as caught:
            await text_of(client, "one too many", 5)
        assert (caught.value.code, caught.value.status) == ("queue_full", 429)
        assert caught.value.retry_after_s == 2.0 and not other.done()
        await client.cancel(["fine"])
        assert reply_text("hello", 50).startswith(await other)
        await client.close(drain=False, grace_s=5)

    asyncio.run(go())


def test_death_is_told_by_the_kernel() -> None:
    async def go() -> None:
        client = process_client("--hold-at", "3")
        await client.start()
        tasks = [asyncio.ensure_future(text_of(client, str(n), 2000)) for n in range(5)]
        while client.stats.running < 5:
            await asyncio.sleep(0.01)
        os.kill(client.pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        for result in results:
            assert isinstance(result, RequestError)
            assert (result.status, result.code) == (503, "engine_dead")
            assert "SIGKILL" in str(result)
        assert client.died.is_set() and not client.alive
        await client.close()

    asyncio.run(go())


def test_a_message_that_cannot_be_read_is_a_death() -> None:
    async def go() -> None:
        client = process_client("--garble")
        await client.start()
        with pytest.raises(RequestError) as caught:
            await asyncio.wait_for(text_of(client, "x", 5), 60)
        assert caught.value.code == "engine_dead" and "cannot be read" in str(caught.value)
        await client.close(drain=False, grace_s=5)

    asyncio.run(go())


def test_start_phases_and_refusal() -> None:
    async def go() -> None:
        seen: list[Progress] = []
        client = process_client(progress=seen)
        await client.start()
        assert [(item.phase, item.seconds) for item in seen] == [
            ("weights", None),
            ("weights", 0.25),
        ]
        await client.close(drain=False, grace_s=5)
        for flag, word in (("--refuse", "does_not_fit"), ("--die-at-start", "engine_died")):
            with pytest.raises(UserError) as caught:
                await process_client(flag).start()
            assert caught.value.code == word

    asyncio.run(go())


def test_private_folder_comes_and_goes() -> None:
    async def go() -> None:
        loading = process_client("--hang-at-start")
        task = asyncio.ensure_future(loading.start())
        while not loading._folder:
            await asyncio.sleep(0.01)
        folder = Path(loading._folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not folder.exists()
        client = process_client()
        await client.start()
        assert not Path(client._folder).exists()  # so that even kill -9 leaves nothing
        assert await text_of(client, "still connected", 5)
        pid = client.pid
        await client.close(drain=False, grace_s=5)
        assert not is_alive(pid)
        refusing = process_client("--refuse")
        with pytest.raises(UserError):
            await refusing.start()
        assert not Path(refusing._folder).exists()

    asyncio.run(go())


def test_engine_that_ignores_stop_is_killed() -> None:
    async def go() -> None:
        client = process_client("--ignore-stop", "--deaf")
        await client.start()
        pid = client.pid
        await client.close(drain=False, grace_s=0.2)
        assert not is_alive(pid)

    asyncio.run(go())


def test_stopping_while_it_starts() -> None:
    async def go() -> None:
        client = process_client("--hang-at-start")
        task = asyncio.ensure_future(client.start())
        while client.pid < 0:
            await asyncio.sleep(0.01)
        pid = client.pid
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_alive(pid)

    asyncio.run(go())
