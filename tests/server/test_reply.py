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


class Busy(Stream):
    """One that sends something between any two looks of the timer."""

    looked = 0

    @property
    def sent(self) -> int:
        self.looked += 1
        return self.looked

    @sent.setter
    def sent(self, value: int) -> None: ...


def reply(stream: Any) -> EventReply:
    return cast(EventReply, stream)


def test_idle_and_busy() -> None:
    async def go() -> None:
        timer = KeepAlive(0.02)
        idle, busy = Stream(), Busy()
        timer.add(reply(idle))
        timer.add(reply(busy))
        while idle.beats < 3:
            await asyncio.sleep(0.002)
        assert busy.looked >= 3 and busy.beats == 0
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
        while not second.beats:
            await asyncio.sleep(0.002)
        timer.remove(reply(second))

    asyncio.run(go())
