"""The engine behind a verb: its client and the line per start-up phase."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO

from metainfer.cli.output import can_take
from metainfer.core.intent import Intent
from metainfer.engine.client import ProcessClient
from metainfer.engine.protocol import EngineInfo, Guards, Progress

command: tuple[str, ...] | None = None
"""Replaces the engine's command line; tests set it."""


def make_client(intent: Intent, screen: Screen, guards: Guards | None = None) -> ProcessClient:
    """A client whose start-up phases go to `screen`."""
    return ProcessClient(intent, screen.progress, command=command, guards=guards)


class Screen:
    """Start-up as it happens: one line per phase with its seconds, then one summary."""

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

    def summary(self, info: EngineInfo, url: str, names: tuple[str, ...]) -> None:
        """What an operator must know, once, when requests are welcome."""
        for text in summary_lines(info, url, names):
            self.line(text)


def summary_lines(info: EngineInfo, url: str, names: tuple[str, ...]) -> list[str]:
    """The lines of the summary."""
    typical = min(info.max_context, 4096)
    at_once = max(1, min(info.max_running, info.kv_tokens // typical))
    total = sum(seconds for _, seconds in info.start_phases)
    lines = [
        f"Ready after {total:.1f} s: {url}/v1  (model {', '.join(names)})",
        f"  context {info.max_context} tokens, cache {info.kv_tokens} tokens: "
        f"about {at_once} concurrent requests of {typical} tokens",
    ]
    chosen = ops_line(info.plan)
    if chosen:
        lines.append(f"  {chosen}")
    verdict = info.plan.get("verification", {}).get("text")
    if verdict:
        lines.append(f"  {verdict}")
    return lines


def ops_line(document: dict[str, object]) -> str:
    """The chosen implementations in one line; empty when the plan does not name them."""
    plan = document.get("plan")
    ops = plan.get("ops") if isinstance(plan, dict) else None
    if not isinstance(ops, dict):
        return ""
    chosen: dict[str, None] = {}
    slow = 0
    for choice in ops.values():
        chosen[str(choice["impl"])] = None
        slow += choice["quality"] != "native"
    verdict = f"; {slow} of {len(ops)} are not native, see doctor" if slow else ""
    return f"ops: {', '.join(chosen)}{verdict}"
