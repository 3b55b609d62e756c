"""The life of a server process: bind, start the engine, serve, drain, stop. No orphan is left.

The port is taken before the model is loaded, so that a clash is told at once; while the model
loads, ``/ready`` says so. The first SIGTERM or SIGINT drains: running requests get
`drain_grace_s` seconds, new ones a 503. The second stops at once. An engine that dies is started
again, within the bounds of `restarts`; beyond them the server ends with exit code 1.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metainfer.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from metainfer.engine.model_text import TextTools
    from metainfer.engine.protocol import EngineClient, EngineInfo
    from metainfer.server.restarts import Restarts
    from metainfer.server.state import ServerState

_log = logging.getLogger("metainfer.server")
_POLL_S = 0.05
_FLUSH_S = 2.0
_YOUNG = 20_000  # objects between collections; a large body is as many
_SWITCH_S = 0.001  # a thread that reads a large body gives the loop its turn after this


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        UserError: the port is taken or the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"Port {port} on {host} is in use.",
                "Stop the program that holds it, or pass --port N (0 = any free one).",
                code="port_in_use",
            ) from error
        if error.errno == errno.EACCES:
            raise UserError(
                f"Port {port} needs more rights.", "Pass --port 1024 or above.", code="port_denied"
            ) from error
        raise UserError(
            f"Address {host} cannot be bound: {error.strerror or error}.",
            "Pass --host with an address of this machine.",
            code="bad_address",
        ) from error
    except OverflowError as error:
        listener.close()
        raise UserError(f"Port {port} is no port.", "Pass 0 to 65535.", code="bad_port") from error
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def bind_unix(path: Path) -> socket.socket:
    """A listening Unix socket, for its owner only. One that nobody listens on is replaced.

    Raises:
        UserError: somebody listens there, or it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            _refuse_if_alive(path)
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise UserError(
            f"The socket {path} cannot be made: {error.strerror or error}.",
            "Pass --uds with a path in a folder of yours.",
            code="bad_address",
        ) from error
    except UserError:
        listener.close()
        raise
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def _refuse_if_alive(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
    raise UserError(
        f"The socket {path} is in use.",
        "Stop the program that holds it, or pass another path.",
        code="port_in_use",
    )


def tls_context(certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """The context of an HTTPS server; None without a certificate.

    Raises:
        UserError: the files cannot be read or do not belong together.
    """
    if certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The certificate {certfile} cannot be used: {error}.",
            "Pass --ssl-certfile and --ssl-keyfile with PEM files that belong together.",
            code="bad_certificate",
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("its key has a password")


class Lifecycle:
    """Runs one server to its end; `run` returns the exit code."""

    def __init__(
        self,
        state: ServerState,
        listener: socket.socket,
        *,
        load_text: Callable[[EngineInfo], TextTools],
        on_ready: Callable[[EngineInfo], None] = lambda info: None,
        say: Callable[[str], None] = _log.info,
        renew: Callable[[], EngineClient] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._state = state
        self._listener = listener
        self._unix = str(listener.getsockname()) if listener.family == socket.AF_UNIX else ""
        self._load_text = load_text
        self._on_ready = on_ready
        self._say = say
        self._renew = renew
        self._tls = tls
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal or the engine's death.

        Raises:
            UserError: the engine refused to start.
        """
        server = _uvicorn(self._state, self._tls)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        http = asyncio.ensure_future(server.serve(sockets=[self._listener]))
        engine = asyncio.ensure_future(self._serve(server))
        state = self._state
        logging.getLogger("metainfer").addHandler(state.journal)
        watch = asyncio.ensure_future(state.history.watch(lambda: state.client.stats))
        try:
            await asyncio.wait((http, engine), return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            return await engine
        finally:
            logging.getLogger("metainfer").removeHandler(state.journal)
            watch.cancel()
            server.should_exit = True
            server.force_exit = server.force_exit or self._stop_now.is_set()
            with suppress(TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(http, _FLUSH_S)
            if state.traces is not None:
                await asyncio.to_thread(state.traces.close)
            self._listener.close()
            if self._unix:
                Path(self._unix).unlink(missing_ok=True)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def _serve(self, server: Any) -> int:
        state = self._state
        try:
            up = await self._bring_up()
            while up:
                client: Any = state.client
                await _any(self._stop, client.died)
                if not client.died.is_set():
                    await self._drain()
                    server.should_exit = True
                    return 0
                up = await self._bring_back()
            if self._stop.is_set():
                return 0
            await self._finish_open(_FLUSH_S)
            return 1
        finally:
            now = self._stop_now.is_set()
            await state.client.close(drain=False, grace_s=0.0 if now else 5.0)

    async def _bring_up(self) -> bool:
        """Start the engine; False when a signal came first."""
        state = self._state
        info = await _unless(self._stop, state.client.start())
        if info is None:
            return False
        text = state.text
        if text is None or state.info is None or state.info.model != info.model:
            text = await asyncio.to_thread(self._load_text, info)
        state.engine_ready(info, text)
        _settle_collector()
        self._on_ready(info)
        client: Any = state.client
        pause = state.restarts.next_pause_s
        if self._renew is not None and pause is not None:
            client.retry_after_s = pause + sum(seconds for _, seconds in info.start_phases)
        return True

    async def _bring_back(self) -> bool:
        """Start the engine again after its death, as often as may be; False when that is over."""
        state, lost = self._state, time.monotonic()
        cause = str(getattr(state.client, "cause", ""))
        while True:
            pause = state.restarts.died(cause)
            if self._renew is None or pause is None:
                self._say(_last_words(state.restarts, cause))
                state.restarting = ""
                return False
            self._say(f"The engine ended ({cause}); it is started again in {pause:g} s.")
            state.restarting = cause.partition(":")[0]  # anyone may read /health
            state.journal.add(f"the engine ended ({state.restarting}); next start in {pause:g} s")
            state.back_at = time.monotonic() + (getattr(state.client, "retry_after_s", 0) or pause)
            await state.client.close(drain=False, grace_s=0.0)
            if await _unless(self._stop, asyncio.sleep(pause, True)) is None:
                return False
            state.client = self._renew()
            try:
                if not await self._bring_up():
                    return False
            except UserError as error:
                cause = str(error)
                continue
            state.restarting = ""
            state.restarts.ready(time.monotonic() - lost)
            state.journal.add(f"ready again after {state.restarts.last_s:.1f} s")
            self._say(f"Ready again after {state.restarts.last_s:.1f} s.")
            return True

    async def _drain(self) -> None:
        state = self._state
        state.draining = True
        grace = state.config.drain_grace_s
        if state.pending:
            self._say(
                f"Draining {state.pending} generations for at most {grace:g} s; "
                "a second signal stops at once."
            )
        await self._finish_open(grace)

    async def _finish_open(self, seconds: float) -> None:
        """Wait until no generation is open, the time is over, or a second signal came."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while self._state.pending and loop.time() < until and not self._stop_now.is_set():
            await asyncio.sleep(_POLL_S)


def _last_words(restarts: Restarts, cause: str) -> str:
    if restarts.most == 0 or restarts.deaths < 2:
        return f"The engine ended ({cause}); the server stops."
    return (
        f"The engine ended {restarts.deaths} times within ten minutes; the server stops. "
        f"First cause: {restarts.first_cause}."
    )


def _settle_collector() -> None:
    """Keep what start-up made out of later collections, which stop every stream while they run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 20)


async def _any(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _unless(event: asyncio.Event, work: Any) -> Any:
    """The result of `work`, or None when `event` comes first (then `work` is cancelled)."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return None
    finally:
        waiting.cancel()


def _uvicorn(state: ServerState, tls: ssl.SSLContext | None) -> Any:
    import uvicorn

    from metainfer.server.app import create_app
    from metainfer.server.wire import BoundedProtocol

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals are ours

    config = uvicorn.Config(
        _with_cors(create_app(state), state.config.cors_origins),
        log_config=None,
        log_level="error",  # one line for each malformed request would fill disks
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        http=BoundedProtocol,
        ws="none",
    )
    config.load()
    config.ssl = tls
    return Server(config)


def _with_cors(app: Any, origins: tuple[str, ...]) -> Any:
    """`app`, which pages of `origins` may call; the browser asks before it has a key."""
    if not origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


def run(main: Any) -> Any:
    """Run the coroutine `main` on uvloop where it is installed."""
    sys.setswitchinterval(_SWITCH_S)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def describe(listener: socket.socket, *, secure: bool = False) -> str:
    """The base URL of `listener`, for people."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}:"
    scheme = "https" if secure else "http"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = os.uname().nodename
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
