"""The engine on a thread of this process: no isolation, one debugger for everything."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from metainfer.core.errors import RequestError, UserError
from metainfer.core.request import Request
from metainfer.core.step import RequestOutput
from metainfer.engine.client import DemuxClient, OnProgress
from metainfer.engine.protocol import (
    Cancel,
    EngineInfo,
    EngineStats,
    Failed,
    Outputs,
    Ready,
    Stop,
    Submit,
    ToEngine,
    rejected,
)


class EngineLike(Protocol):
    """What `InprocClient` needs of ``metainfer.engine.engine.Engine``."""

    def start(self) -> EngineInfo: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_ids: Sequence[str]) -> Sequence[RequestOutput]: ...

    def step(self) -> tuple[Sequence[RequestOutput], EngineStats]: ...

    def stats(self) -> EngineStats: ...

    @property
    def has_work(self) -> bool: ...

    def close(self) -> None: ...


class InprocClient(DemuxClient):
    """The engine on a thread of this process: no isolation, one debugger for everything.

    `build` makes the engine on that thread; it gets the progress callback.
    """

    def __init__(
        self, build: Callable[[OnProgress], EngineLike], on_progress: OnProgress | None = None
    ) -> None:
        super().__init__(on_progress)
        self._build = build
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> EngineInfo:
        """Build and start the engine on its thread.

        Raises:
            UserError: the engine refused to start.
        """
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        return await self._ready

    def _send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def _post(self, handler: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(handler, *args)

    def _run(self) -> None:
        engine = None
        try:
            engine = self._build(lambda progress: self._post(self._receive, progress))
            self._post(self._receive, Ready(engine.start()))
            self._serve(engine)
            self._post(self._die, "it was closed")
        except UserError as error:
            failed = Failed(
                error.cause, error.remedy, error.code, error.exit_code, dict(error.to_json())
            )
            self._post(self._receive, failed)
        except Exception as error:  # noqa: BLE001 - the thread's last stop: streams must learn of it
            self._post(self._die, f"{type(error).__name__}: {error}")
        finally:
            if engine is not None:
                engine.close()

    def _serve(self, engine: EngineLike) -> None:
        stopping = False
        while True:
            while not engine.has_work or not self._inbox.empty():
                if stopping and not engine.has_work:
                    return
                message = self._inbox.get()
                if isinstance(message, Submit):
                    self._admit(engine, message)
                elif isinstance(message, Cancel):
                    ended = tuple(engine.cancel(message.request_ids))
                    self._post(self._receive, Outputs(ended, engine.stats()))
                elif message.drain:
                    stopping = True
                else:
                    return
            self._post(self._receive, Outputs(*map(_frozen, engine.step())))

    def _admit(self, engine: EngineLike, message: Submit) -> None:
        for request in message.requests:
            try:
                engine.submit(request)
            except RequestError as error:
                self._post(self._receive, rejected(request.request_id, error))

    async def close(self, *, drain: bool = True, grace_s: float = 30.0) -> None:
        """Stop the thread after the running requests, at most `grace_s` seconds."""
        if self._thread is None:
            return
        self._send(Stop(drain=drain))
        await asyncio.to_thread(self._thread.join, max(grace_s, 1.0))
        if self._thread.is_alive():
            self._send(Stop(drain=False))
        self._die("it was closed")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
