"""The engine process: ``python -m metainfer.engine.process --address ipc://...``.

The first line of standard input holds the options as JSON. Messages in and out are those of
`engine.protocol`. It ends with its parent (the parent sets the death signal), on `Stop`, or with
`Failed` and a non-zero code; Ctrl-C is the server's business.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import mmap
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from metainfer.core.errors import MetaInferError, RequestError, UserError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.request import Request
from metainfer.engine.protocol import (
    Cancel,
    Failed,
    FromEngine,
    Guards,
    Outputs,
    Ready,
    Submit,
    ToEngine,
    rejected,
)
from metainfer.engine.recorder import SIZE, FlightRecorder


class EngineProcess:
    """The loop between a socket and an `Engine`."""

    def __init__(self, socket: Any, make: Callable[..., Any] | None = None) -> None:
        self._make = make
        self._socket = socket
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode
        self._draining = False

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encode(message))

    def run(self, options: Options) -> int:
        """Start the engine and serve until told to stop; returns the exit code."""
        from metainfer.engine.engine import Engine

        engine = (self._make or Engine)(
            options.intent,
            on_progress=self.send,
            guards=options.guards,
            recorder=FlightRecorder(options.block()),
            on_fault=self.send,
        )
        try:
            info = engine.start()
        except UserError as error:
            body: dict[str, Any] = dict(error.to_json())
            self.send(Failed(error.cause, error.remedy, error.code, error.exit_code, body))
            return error.exit_code
        self.send(Ready(info))
        try:
            self._serve(engine)
        finally:
            engine.close()
        return 0

    def _serve(self, engine: Any) -> None:
        """Take in messages between steps; wait for one when there is nothing to compute."""
        while True:
            while not engine.has_work or self._socket.poll(0):
                if self._draining and not engine.has_work:
                    return
                if not self._take(engine, self._decode(self._socket.recv())):
                    return
            outputs, stats = engine.step()
            self.send(Outputs(tuple(outputs), stats))

    def _take(self, engine: Any, message: ToEngine) -> bool:
        """Obey one message; False means leave now."""
        if isinstance(message, Submit):
            for request in message.requests:
                self._submit(engine, request)
        elif isinstance(message, Cancel):
            ended = engine.cancel(message.request_ids)
            self.send(Outputs(tuple(ended), engine.stats()))
        else:
            self._draining = True
            return message.drain
        return True

    def _submit(self, engine: Any, request: Request) -> None:
        try:
            engine.submit(request)
        except RequestError as error:
            self.send(rejected(request.request_id, error))


@dataclass(frozen=True, slots=True)
class Options:
    """What the parent says on standard input. `flight`: descriptor of the recorder's block."""

    intent: Intent
    guards: Guards
    flight: int

    def block(self) -> memoryview | None:
        """The recorder's block; None where the parent gave none."""
        if self.flight < 0:
            return None
        return memoryview(mmap.mmap(self.flight, SIZE))


def read_options(line: str) -> Options:
    """The options out of their line."""
    said = json.loads(line)
    guards = msgspec.convert(said.get("guards", {}), Guards)
    return Options(_intent(said["intent"]), guards, said.get("flight", -1))


def _intent(said: dict[str, Any]) -> Intent:
    fields = dict(said)
    fields["origins"] = {name: Origin(origin) for name, origin in fields["origins"].items()}
    fields["allow_fallback"] = tuple(fields["allow_fallback"])
    return Intent(**fields)


def main(make: Callable[..., Any] | None = None) -> int:
    """Entry point of the child. `make` builds another engine than `Engine`, for tests."""
    import zmq

    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = read_options(sys.stdin.readline())
    faulthandler.enable()  # a crash in C shows where
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.connect(arguments.address)
    process = EngineProcess(socket, make)
    try:
        return process.run(options)
    except Exception as error:  # noqa: BLE001 - the last stop: the server must learn of it
        # The text of a foreign error may quote a request: it stays in the log.
        text = f": {error}" if isinstance(error, MetaInferError) else ""
        process.send(
            Failed(f"{type(error).__name__}{text}.", "This is a bug; report it.", "engine_bug")
        )
        traceback.print_exc()  # last: standard error may be a pipe that nobody reads any more
        return 1
    finally:
        socket.close()
        context.term()


if __name__ == "__main__":
    sys.exit(main())
