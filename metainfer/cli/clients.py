"""The engine behind a verb: its client, and a line per start-up phase."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

from metainfer.cli.output import can_take
from metainfer.core.intent import Intent
from metainfer.engine.client import ProcessClient
from metainfer.engine.protocol import Guards, Progress

command: tuple[str, ...] | None = None
"""Replaces the engine's command line; tests set it."""


def make_client(intent: Intent, screen: Screen, guards: Guards | None = None) -> ProcessClient:
    """A client whose start-up phases go to `screen`."""
    return ProcessClient(intent, screen.progress, command=command, guards=guards)


class Screen:
    """Start-up as it happens: one line per phase with its seconds."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet

    def line(self, text: str) -> None:
        if not self._quiet and can_take(self._stream):
            with suppress(OSError):  # a full disk must not end what it would tell of
                print(text, file=self._stream, flush=True)

    def progress(self, progress: Progress) -> None:
        """Show a phase: when it begins on a terminal, when it ends everywhere."""
        terminal = self._stream.isatty() and not self._quiet
        if progress.seconds is None:
            if terminal and can_take(self._stream):
                print(f"  {progress.phase} ...", end="\r", file=self._stream, flush=True)
            return
        detail = f"  {progress.detail}" if progress.detail else ""
        self.line(f"  {progress.phase:<20} {progress.seconds:7.2f} s{detail}")

    def lines(self, texts: Iterable[str]) -> None:
        """Several lines."""
        for text in texts:
            self.line(text)
