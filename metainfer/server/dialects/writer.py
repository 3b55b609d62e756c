"""What the dialects share on the way out: a writer of events, and the two ways to run it.

A writer takes the pieces of one answer in order and keeps the finished object while it makes
events. The answer in one piece is that object, so it cannot differ from the streamed one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from metainfer.core.errors import RequestError
from metainfer.server.generate import deltas
from metainfer.server.prepare import Choice, Job
from metainfer.server.reply import EventForm, EventReply, JsonReply
from metainfer.server.state import ServerState
from metainfer.text.answer import Piece

Event = dict[str, Any]
"""The data of one server-sent event; its name is the ``type``."""

_encode = msgspec.json.Encoder().encode


class Writer(Protocol):
    """One answer in a dialect."""

    answer: dict[str, Any]

    def begin(self, choice: Choice) -> list[Event]:
        """The first events; the prompt has been taken in."""
        ...

    def push(self, piece: Piece) -> list[Event]:
        """What `piece` adds."""
        ...

    def end(self, choice: Choice) -> list[Event]:
        """The last events; `answer` is whole."""
        ...

    def fail(self, error: RequestError) -> list[Event]:
        """The last events of an answer that broke off."""
        ...


def encoded(event: Event) -> bytes:
    """`event` on the wire."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + _encode(event) + b"\n\n"


async def _stream(state: ServerState, job: Job, writer: Writer) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async with aclosing(deltas(state, job)) as items:
            async for choice, delta in items:
                events = [] if begun else writer.begin(choice)
                begun = True
                for piece in delta.pieces:
                    events += writer.push(piece)
                if delta.finish is not None:
                    events += writer.end(choice)
                if events:
                    yield b"".join(map(encoded, events))
    except RequestError as error:
        if not begun:
            raise
        yield b"".join(map(encoded, writer.fail(error)))


async def _whole(state: ServerState, job: Job, writer: Writer) -> bytes:
    async with aclosing(deltas(state, job)) as items:
        async for choice, delta in items:
            for piece in delta.pieces:
                writer.push(piece)
            if delta.finish is not None:
                writer.end(choice)
    return _encode(writer.answer)


def reply(
    state: ServerState, job: Job, writer: Writer, form: EventForm, *, stream: bool
) -> Response:
    """The ASGI answer that generates `job` in the dialect of `writer`."""
    if stream:
        return EventReply(_stream(state, job, writer), state.keep_alive, form)
    return JsonReply(lambda: _whole(state, job, writer))
