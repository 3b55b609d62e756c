"""Trying a grammar out in a process that may be killed, so that none can hold the server up."""

from __future__ import annotations

import json
import socket
from contextlib import suppress

from metainfer.core.request import GrammarSpec
from metainfer.grammar.backend import GrammarError
from metainfer.grammar.check_main import CPU_S
from metainfer.workers.process import Child, spawn_python

START_S = 30.0
WALL_S = 10.0
"""A machine under load gives the `CPU_S` seconds of processor time no later than this, or never."""


class Checker:
    """One checking process, started when first needed and again after a grammar ended it. Blocking;
    one caller at a time."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._child: Child | None = None
        self._socket: socket.socket | None = None
        self._buffer = b""

    def check(self, spec: GrammarSpec) -> None:
        """Compile `spec` over bytes and forget it.

        Raises:
            GrammarError: the library refuses it, or it takes too long or too much memory.
            OSError: the process cannot be started.
        """
        if self._socket is None:
            self._start()
        try:
            assert self._socket is not None
            self._socket.settimeout(WALL_S)
            self._socket.sendall(json.dumps([spec.kind, spec.text]).encode() + b"\n")
            cause = self._line()
        except OSError as error:
            self.close()
            raise GrammarError(
                f"it takes more than {CPU_S:g} s or too much memory to compile"
            ) from error
        if cause:
            raise GrammarError(cause)

    def close(self) -> None:
        """End the process; the next check starts another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._child is not None:
            self._child.terminate(0.0)
            self._child = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._child = spawn_python(
                "metainfer.grammar.check_main", [self._library, str(number)], pass_fds=(number,)
            )
        self._socket, self._buffer = ours, b""
        ours.settimeout(START_S)
        try:
            self._line()
        except OSError:
            with suppress(OSError):
                self.close()
            raise

    def _line(self) -> str:
        """The next answer; `OSError` when the other side is gone or silent."""
        assert self._socket is not None
        while b"\n" not in self._buffer:
            data = self._socket.recv(65_536)
            if not data:
                raise ConnectionResetError("the checking process ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        text: str = json.loads(line)
        return text
