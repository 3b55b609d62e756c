"""The keep-alive timer: idle streams get comments, busy ones do not, none is forgotten."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from metainfer.server.reply import EventReply, KeepAlive


class Stream:
    """As much of an `EventReply` as the timer sees."""

    def __init__(self) -> None:
        self.sent = 0
        self.beats = 0

    async def beat(self) -> None:
        self.beats += 1


def reply(stream: Any) -> EventReply:
    return cast(EventReply, stream)


def test_idle_and_busy() -> None:
    async def go() -> None:
        timer = KeepAlive(0.02)
        idle, busy = Stream(), Stream()
        timer.add(reply(idle))
        timer.add(reply(busy))
        for _ in range(40):
            busy.sent += 1
            await asyncio.sleep(0.002)
        assert idle.beats >= 2
        assert busy.beats == 0
        timer.remove(reply(idle))
        timer.remove(reply(busy))

    asyncio.run(go())


def test_a_stream_that_follows_the_last_one_is_not_forgotten() -> None:
    async def go() -> None:
        timer = KeepAlive(0.02)
        first, second = Stream(), Stream()
        timer.add(reply(first))
        await asyncio.sleep(0)
        timer.remove(reply(first))
        timer.add(reply(second))  # in the same turn of the loop
        await asyncio.sleep(0.1)
        assert second.beats >= 1
        timer.remove(reply(second))

    asyncio.run(go())
