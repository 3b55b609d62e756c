"""The client of an engine in a child process (`ProcessClient`), and what any client shares.

It demultiplexes the engine's step outputs to one mailbox per request. `submit` is an async
generator: leaving it early, for whatever reason, cancels the request in the engine. The engine's
end is reported by the operating system (a pidfd), and then every open stream raises
``engine_dead``: nobody waits for a process that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from metainfer.core.digest import canonical_json
from metainfer.core.errors import InternalError, RefusedError, RequestError, UserError
from metainfer.core.intent import Intent
from metainfer.core.request import Request
from metainfer.core.step import RequestOutput
from metainfer.core.verdict import Reason
from metainfer.engine.overseer import Overseer
from metainfer.engine.protocol import (
    Cancel,
    EngineInfo,
    EngineStats,
    Failed,
    Fault,
    FromEngine,
    Guards,
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
_log = logging.getLogger("metainfer.engine")


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


def engine_dead(detail: str = "", retry_after_s: float | None = None) -> RequestError:
    """What every open and every new request gets once the engine is gone."""
    cause = "The engine process ended" + (f" ({detail})." if detail else ".")
    return RequestError(
        cause,
        "Its log says why; send the request again when it is back.",
        status=503,
        error_type="server_error",
        code="engine_dead",
        retry_after_s=retry_after_s,
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


class DemuxClient(ABC):
    """What any client has, however it reaches its engine: mailboxes, stats, start-up, death."""

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self._on_progress = on_progress
        self._boxes: dict[str, _Mailbox] = {}
        self._stats = EngineStats()
        self._dead: RequestError | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._phase = "start"
        self.retry_after_s: float | None = None  # what clients are told when the engine dies
        self.cause = ""  # of its death
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

    def abort(self, request_ids: Sequence[str], error: RequestError) -> None:
        """End requests in the engine; their streams raise `error` after what they hold already."""
        here = [name for name in request_ids if name in self._boxes]
        if here and self._dead is None:
            self._send(Cancel(tuple(here)))
        for name in here:
            self._boxes[name].put(error)

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
        elif isinstance(message, Fault):
            self._on_fault(message)
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

    def _on_fault(self, fault: Fault) -> None:
        """Something broke in the engine, which goes on."""
        _log.warning(fault.text)

    def flight(self) -> dict[str, Any] | None:
        """The engine's last steps, where this side can see them."""
        return None

    @property
    def hung(self) -> str:
        """Why the engine is thought to hang; empty when it is not, or nobody looks."""
        return ""

    def _die(self, detail: str) -> None:
        if self._dead is not None:
            return
        self._dead = engine_dead(detail, self.retry_after_s)
        self.cause = detail
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


class ProcessClient(DemuxClient):
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
        guards: Guards | None = None,
    ) -> None:
        super().__init__(on_progress)
        self._intent = intent
        self._guards = guards or Guards()
        self._overseer = Overseer(self._guards.hang_after_s)
        self._closing = False
        self._info: EngineInfo | None = None
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
        try:
            self._folder = tempfile.mkdtemp(prefix="metainfer-")  # mode 0700
        except OSError as error:
            raise UserError(
                f"no folder for the engine's socket can be made: {error.strerror}.",
                "Make room, or set TMPDIR to a folder that can be written.",
                code="no_room",
            ) from error
        address = f"ipc://{self._folder}/engine"
        try:
            self._context = zmq.Context()
            self._socket = self._context.socket(zmq.PAIR)
            self._socket.set_hwm(0)  # a full queue would block or drop; requests are bounded above
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(address)
            loop.add_reader(self._socket.fd, self._on_readable)
            self._spawn(address)
            info = self._info = await self._ready
            self._keep(asyncio.ensure_future(self._oversee()))
            # Connected: the name has served, and nothing is left behind if we are killed.
            shutil.rmtree(self._folder, ignore_errors=True)
            return info
        except BaseException:
            await self.close(drain=False, grace_s=0.0)
            raise

    def _spawn(self, address: str) -> None:
        from metainfer.workers.process import spawn

        flight = self._overseer.descriptor
        guards = msgspec.to_builtins(self._guards)
        said = {"intent": self._intent, "guards": guards, "flight": flight}
        self._child = spawn(
            [*self._command, "--address", address],
            name="the engine",
            pass_fds=(flight,),
            stdin=canonical_json(said).encode() + b"\n",
        )
        self._overseer.close_descriptor()
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
        self._on_readable()
        if self._child is not None:
            hung = self._overseer.hung
            self._die(self._child.describe_exit() + (f"; it hung in {hung}" if hung else ""))

    async def _oversee(self) -> None:
        """Look for a step that hangs; one that has for twice the time ends the engine."""
        while self._dead is None:
            await asyncio.sleep(self._overseer.look_every_s)
            hung = self._overseer.hung
            over = self._overseer.look()
            if self._overseer.hung and not hung:
                self._dump("hang")
            if over and self._child is not None:
                _log.error("the engine is killed: its step did not come to an end")
                self._child.signal(signal.SIGQUIT)
                return

    def _on_fault(self, fault: Fault) -> None:
        super()._on_fault(fault)
        self._dump(fault.kind)

    def _dump(self, reason: str) -> None:
        info = self._info
        self._overseer.save(
            reason,
            {
                "cause": self.cause or self.hung,
                "phase": self.phase,
                "start_phases": [(p.phase, p.seconds) for p in self.progress],
                "plan": {} if info is None else info.plan,
                "stats": msgspec.to_builtins(self._stats),
            },
        )

    def flight(self) -> dict[str, Any]:
        return self._overseer.flight()

    @property
    def hung(self) -> str:
        return self._overseer.hung

    def _die(self, detail: str) -> None:
        alive = self._dead is None
        super()._die(detail)
        if alive and not self._closing and self._child is not None:
            self._dump("engine_dead")

    async def close(self, *, drain: bool = True, grace_s: float = 30.0) -> None:
        """Stop the engine: politely, then SIGTERM, then SIGKILL. Removes the private folder."""
        self._closing = True
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
        self._overseer.close_descriptor()
        self._die("it was closed")
