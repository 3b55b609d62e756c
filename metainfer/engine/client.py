"""Clients of the engine: in a child process (`ProcessClient`) or on a thread (`InprocClient`).

Both demultiplex the engine's step outputs to one mailbox per request. `submit` is an async
generator: leaving it early, for whatever reason, cancels the request in the engine. The engine's
end is reported by the operating system (a pidfd), and then every open stream raises
``engine_dead``: nobody waits for a process that is gone.
"""

from __future__ import annotations

import asyncio
import queue
import shutil
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from metainfer.core.digest import canonical_json
from metainfer.core.errors import InternalError, RefusedError, RequestError, UserError
from metainfer.core.intent import Intent
from metainfer.core.request import Request
from metainfer.core.step import RequestOutput
from metainfer.core.verdict import Reason
from metainfer.engine.protocol import (
    Cancel,
    EngineInfo,
    EngineStats,
    Failed,
    FromEngine,
    Outputs,
    Progress,
    Ready,
    Rejected,
    Stop,
    Submit,
    ToEngine,
)

if TYPE_CHECKING:
    from metainfer.workers.process import Child

OnProgress = Callable[[Progress], None]

_DRAIN_AFTER_DEATH_S = 0.05
_TERM_S = 2.0
_MESSAGES_PER_TURN = 64


class EngineRefusedError(RefusedError):
    """The engine could not start; cause, reasons, remedy and JSON body are the engine's own."""

    default_code = "engine_refused"

    def __init__(self, failed: Failed) -> None:
        reasons = [
            Reason(reason["code"], reason["message"]) for reason in failed.body.get("reasons", ())
        ]
        super().__init__(failed.cause, failed.remedy, reasons=reasons, code=failed.code)
        self.exit_code = failed.exit_code
        self._body = failed.body

    def to_json(self) -> dict[str, object]:
        return dict(self._body) if self._body else super().to_json()


def engine_dead(detail: str = "") -> RequestError:
    """What every open and every new request gets once the engine is gone."""
    cause = "The engine process ended" + (f" ({detail})." if detail else ".")
    return RequestError(
        cause,
        "Its log says why; send the request again when it is back.",
        status=503,
        error_type="server_error",
        code="engine_dead",
    )


class _Mailbox:
    """Outputs of one request, in order. One reader; writers run on the same event loop."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[RequestOutput | RequestError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | RequestError) -> None:
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> RequestOutput:
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        if isinstance(item, RequestError):
            raise item
        return item


class _DemuxClient(ABC):
    """What both clients share: mailboxes, the last stats, start-up and death."""

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self._on_progress = on_progress
        self._boxes: dict[str, _Mailbox] = {}
        self._stats = EngineStats()
        self._dead: RequestError | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._phase = "start"
        self.progress: list[Progress] = []  # start-up phases that ended
        self.died = asyncio.Event()
        self.last_heard = time.monotonic()  # the latest step's results came in

    @abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Hand a message to the engine without waiting."""

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def phase(self) -> str:
        """The start-up phase that runs, or ran last."""
        return self._phase

    @property
    def alive(self) -> bool:
        return self._dead is None and self._ready is not None

    async def submit(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Stream outputs until one has `finish` set; leaving early cancels the request.

        Raises:
            RequestError: refused by the scheduler, or the engine died (503 ``engine_dead``).
        """
        if self._dead is not None:
            raise self._dead
        if request.request_id in self._boxes:
            raise InternalError(f"request id {request.request_id!r} is in use")
        box = self._boxes[request.request_id] = _Mailbox()
        self._send(Submit((request,)))
        over = False
        try:
            while not over:
                try:
                    output = await box.get()
                except RequestError:
                    over = True
                    raise
                over = output.finish is not None
                yield output
        finally:
            del self._boxes[request.request_id]
            if not over and self._dead is None:
                self._send(Cancel((request.request_id,)))

    async def cancel(self, request_ids: Sequence[str]) -> None:
        if request_ids and self._dead is None:
            self._send(Cancel(tuple(request_ids)))

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self.last_heard = time.monotonic()
            self._stats = message.stats
            for output in message.outputs:
                box = self._boxes.get(output.request_id)
                if box is not None:  # else: cancelled while the step ran
                    box.put(output)
        elif isinstance(message, Rejected):
            box = self._boxes.get(message.request_id)
            if box is not None:
                box.put(_rejection(message))
        elif isinstance(message, Progress):
            self._phase = message.phase
            if message.seconds is not None:
                self.progress.append(message)
            if self._on_progress is not None:
                self._on_progress(message)
        elif self._ready is not None and not self._ready.done():
            if isinstance(message, Ready):
                self._ready.set_result(message.info)
            else:
                self._ready.set_exception(EngineRefusedError(message))
        elif isinstance(message, Failed):
            self._die(f"{message.cause} {message.remedy}".strip())

    def _die(self, detail: str) -> None:
        if self._dead is not None:
            return
        self._dead = engine_dead(detail)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(
                UserError(
                    f"The engine ended before it was ready ({detail}), in phase '{self._phase}'.",
                    "Its log above says why.",
                    code="engine_died",
                )
            )
            self._ready.exception()  # looked at: nobody may be waiting for it any more
        for box in self._boxes.values():
            box.put(self._dead)
        self.died.set()


def _rejection(message: Rejected) -> RequestError:
    return RequestError(
        message.cause,
        message.remedy,
        status=message.status,
        error_type=message.error_type,
        param=message.param,
        code=message.code,
        retry_after_s=message.retry_after_s,
    )


class ProcessClient(_DemuxClient):
    """The engine as a child process behind a socket in a private folder.

    `command` replaces ``python -m metainfer.engine.process`` (tests). A guardian sees to it that
    the engine and its workers die with this process, and keeps Ctrl-C from them.
    """

    def __init__(
        self,
        intent: Intent,
        on_progress: OnProgress | None = None,
        *,
        command: Sequence[str] | None = None,
    ) -> None:
        super().__init__(on_progress)
        self._intent = intent
        self._command = tuple(command or (sys.executable, "-m", "metainfer.engine.process"))
        self._folder = ""
        self._context: Any = None
        self._socket: Any = None
        self._child: Child | None = None
        self._watching = False
        self._exited = asyncio.Event()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode

    @property
    def pid(self) -> int:
        """Process id of the engine; -1 before it started."""
        pid = self._child.pid if self._child is not None else None
        return -1 if pid is None else pid

    async def start(self) -> EngineInfo:
        """Start the child and wait for its `Ready`.

        Raises:
            UserError: the engine refused to start, or ended before it was ready.
        """
        import zmq

        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._folder = tempfile.mkdtemp(prefix="metainfer-")  # mode 0700
        address = f"ipc://{self._folder}/engine"
        try:
            self._context = zmq.Context()
            self._socket = self._context.socket(zmq.PAIR)
            self._socket.set_hwm(0)  # a full queue would block or drop; requests are bounded above
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(address)
            loop.add_reader(self._socket.fd, self._on_readable)
            self._spawn(address)
            info = await self._ready
            # Connected: the name has served, and nothing is left behind if we are killed.
            shutil.rmtree(self._folder, ignore_errors=True)
            return info
        except BaseException:
            await self.close(drain=False, grace_s=0.0)
            raise

    def _spawn(self, address: str) -> None:
        from metainfer.workers.process import spawn

        options = Path(self._folder) / "options.json"
        options.write_text(canonical_json({"intent": self._intent}) + "\n")
        # The engine reads its options from standard input, which `spawn` leaves empty.
        redirect = ("/bin/sh", "-c", 'exec "$@" <"$0"', str(options))
        self._child = spawn([*redirect, *self._command, "--address", address], name="the engine")
        asyncio.get_running_loop().add_reader(self._child.fileno(), self._on_exit)
        self._watching = True

    def _unwatch(self) -> None:
        if self._watching and self._child is not None:
            asyncio.get_running_loop().remove_reader(self._child.fileno())
            self._watching = False

    def _keep(self, future: asyncio.Future[Any]) -> None:
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)

    def _on_readable(self) -> None:
        """Take every message that is there: the descriptor tells of a change, not of a state."""
        import zmq

        for _ in range(_MESSAGES_PER_TURN):
            if self._socket is None:
                return
            try:
                self._receive(self._decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return
            except msgspec.DecodeError as error:
                self._die(f"it sent a message that cannot be read: {error}")
        asyncio.get_running_loop().call_soon(self._on_readable)  # let others have a turn

    def _send(self, message: ToEngine) -> None:
        import zmq

        with suppress(zmq.Again):  # the engine is gone; its pidfd tells
            self._socket.send(self._encode(message), zmq.NOBLOCK)
        # Sending may swallow the descriptor's sign that something came in.
        asyncio.get_running_loop().call_soon(self._on_readable)

    def _on_exit(self) -> None:
        self._unwatch()
        self._exited.set()
        self._keep(asyncio.ensure_future(self._after_exit()))

    async def _after_exit(self) -> None:
        # Its last words (Failed, last outputs) may still be in the socket.
        await asyncio.sleep(_DRAIN_AFTER_DEATH_S)
        if self._child is not None:
            self._die(self._child.describe_exit())

    async def close(self, *, drain: bool = True, grace_s: float = 30.0) -> None:
        """Stop the engine: politely, then SIGTERM, then SIGKILL. Removes the private folder."""
        if not drain:
            self._die("the server stops")  # open streams learn it now, not after the grace period
        if self._child is not None:
            if self._socket is not None and grace_s > 0 and not self._exited.is_set():
                self._send(Stop(drain=drain))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._exited.wait(), grace_s)
            self._unwatch()
            await asyncio.to_thread(self._child.terminate, min(grace_s, _TERM_S))
        for task in tuple(self._tasks):
            task.cancel()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fd)
            self._socket.close(linger=0)
            self._context.term()
            self._socket = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._die("it was closed")


class EngineLike(Protocol):
    """What `InprocClient` needs of ``metainfer.engine.engine.Engine``."""

    def start(self) -> EngineInfo: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_ids: Sequence[str]) -> Sequence[RequestOutput]: ...

    def step(self) -> tuple[Sequence[RequestOutput], EngineStats]: ...

    @property
    def has_work(self) -> bool: ...

    def close(self) -> None: ...


class InprocClient(_DemuxClient):
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
                    self._post(self._receive, Outputs(ended, self._stats))
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


def rejected(request_id: str, error: RequestError) -> Rejected:
    """The message that carries `error` to the other side."""
    return Rejected(
        request_id,
        error.status,
        error.cause,
        error.remedy,
        error.code,
        error.param,
        error.error_type,
        error.retry_after_s,
    )
