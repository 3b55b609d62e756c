"""A rank process: ``python -m metainfer.workers.rank_main FD``. Makes the worker, then obeys.

When a method raises and the worker has an ``abort(cause)``, that is called before anything else: it
is how peers that wait for this rank in a collective are released.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

from metainfer.core.errors import UserError
from metainfer.workers import wire


def main(arguments: list[str]) -> int:
    """Serve one group until it says to leave or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front process
    channel = socket.socket(fileno=int(arguments[0]))
    body = wire.receive(channel)
    if body is None:
        return 1
    hello = wire.for_rank(body)
    assert isinstance(hello, wire.Hello)
    worker, answer = _attempt(None, "spawn", lambda: _make(hello))
    wire.send(channel, wire.Done() if worker is not None else answer)
    while worker is not None:
        body = wire.receive(channel)
        message = wire.Leave() if body is None else wire.for_rank(body)
        if isinstance(message, wire.Invoke):
            method, given = message.method, message.arguments
            _, answer = _attempt(worker, method, lambda m=method, g=given: getattr(worker, m)(*g))
            _reply(channel, answer)
            continue
        close = getattr(worker, "close", None)
        if close is not None:
            _, answer = _attempt(None, "close", close)
            with contextlib.suppress(OSError):
                wire.send(channel, answer)
        return int(isinstance(answer, wire.Raised))
    return 1


def _make(hello: wire.Hello) -> object:
    module, _, name = hello.target.partition(":")
    make = getattr(importlib.import_module(module), name)
    worker = make(wire.RankFacts(hello.rank, hello.world, hello.token, hello.facts))
    if worker is None:
        raise TypeError(f"{hello.target} made no worker")
    return worker


def _attempt(worker: object, method: str, step: Any) -> tuple[Any, wire.Done | wire.Raised]:
    """The result of a step with the message about it."""
    try:
        result = step()
        return result, wire.Done(None if method in ("spawn", "close") else result)
    except Exception as error:  # noqa: BLE001 - told to the group, which raises it on all
        at = time.monotonic()
        abort = getattr(worker, "abort", None)
        if abort is not None:
            with contextlib.suppress(Exception):
                abort(f"{type(error).__name__}: {error}")
        about = getattr(error, "peer", None)
        kind, trace = type(error).__name__, traceback.format_exc()
        if isinstance(error, UserError):
            text = str(error).removesuffix(error.remedy).strip()
            return None, wire.Raised(kind, text, trace, at, about, error.remedy, error.code)
        return None, wire.Raised(kind, str(error), trace, at, about)


def _reply(channel: socket.socket, answer: wire.Done | wire.Raised) -> None:
    try:
        wire.send(channel, answer)
    except (TypeError, OverflowError) as error:  # the result is no plain data
        wire.send(channel, wire.Raised(type(error).__name__, str(error), "", time.monotonic()))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown: it may hang in a library that a dead peer holds up
