"""ASGI answers that generate: one JSON body, or a stream of server-sent events.

Both watch for the client's leaving and then cancel the work within the same loop turn. A stream
sends its status line with its first event, so that a refusal by the scheduler is still an HTTP
error; after that an error is an event in the dialect's shape, and no ``[DONE]`` follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from starlette.responses import Response

from metainfer.core.errors import RequestError
from metainfer.server.access import Receive, Scope, Send
from metainfer.server.errors import error_event, error_response, internal

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class EventForm:
    """What a dialect's streams say besides their events: `done` at a good end, `beat` to keep an
    idle stream open, `failure` where one breaks off."""

    done: bytes
    beat: bytes
    failure: Callable[[RequestError], bytes]


OPENAI = EventForm(b"data: [DONE]\n\n", b": keep-alive\n\n", error_event)


class _Work(Response):
    """Runs `work`; when the client leaves, cancels it and stays silent."""

    def __init__(self) -> None:
        super().__init__()
        self._left = False

    async def _watch(self, receive: Receive, task: asyncio.Task[object]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        task.cancel()

    async def _run(self, receive: Receive, work: Awaitable[None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.ensure_future(self._watch(receive, task))
        try:
            await work
        except asyncio.CancelledError:
            if not self._left:
                raise
            task.uncancel()
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher


class JsonReply(_Work):
    """`body()` makes the JSON bytes; its `RequestError` becomes the status."""

    def __init__(self, body: Callable[[], Awaitable[bytes]]) -> None:
        super().__init__()
        self._make = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._make()
        except RequestError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class EventReply(_Work):
    """`events` yields whole server-sent events."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive: KeepAlive,
        form: EventForm = OPENAI,
    ) -> None:
        super().__init__()
        self._events = events
        self._form = form
        self._keep_alive = keep_alive
        self._started = False
        self._over = False
        self._send: Send | None = None
        self.sent = 0  # events and beats so far; the keep-alive looks at it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._keep_alive.add(self)
        try:
            await self._run(receive, self._stream(scope, receive, send))
        finally:
            self._over = True
            self._keep_alive.remove(self)

    async def _write(self, data: bytes) -> None:
        assert self._send is not None
        self.sent += 1
        if not self._started:
            self._started = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": list(_SSE_HEADERS)}
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._write(event)
            if self._form.done:
                await self._write(self._form.done)
        except RequestError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - mid-stream there is no other way to say it
            failure = internal(error)
        else:
            self._over = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        self._over = True
        if not self._started:
            await error_response(failure, scope["path"])(scope, receive, send)
            return
        await self._write(self._form.failure(failure))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def beat(self) -> None:
        """A sign of life that keeps proxies from closing an idle stream."""
        if not self._over:
            await self._write(self._form.beat)


class KeepAlive:
    """One timer for all streams: those without an event for `interval_s` get a comment."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._seen: dict[EventReply, int] = {}
        self._beats: set[asyncio.Future[None]] = set()
        self._task: asyncio.Future[None] | None = None

    def add(self, reply: EventReply) -> None:
        self._seen[reply] = -1
        if self._task is None:
            self._task = asyncio.ensure_future(self._tick())

    def remove(self, reply: EventReply) -> None:
        self._seen.pop(reply, None)
        if not self._seen and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s / 2)
            for reply, seen in self._seen.items():
                if reply.sent == seen:
                    beat = asyncio.ensure_future(reply.beat())
                    self._beats.add(beat)
                    beat.add_done_callback(self._beats.discard)
                self._seen[reply] = reply.sent
