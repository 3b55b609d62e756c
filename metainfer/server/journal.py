"""The latest log lines of this process, kept in a form that holds nothing of a user's.

A line keeps its template and its numbers. Text that was put into a template is replaced by its
hash, so that equal texts can be told to be equal; of an exception its type and its places in our
code stay, its message does not.
"""

from __future__ import annotations

import hashlib
import logging
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any

KEPT = 500
_ROOT = Path(__file__).parents[2]


class Journal(logging.Handler):
    """Holds the last `KEPT` lines of the loggers it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        line: dict[str, Any] = {
            "at": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = type(record.exc_info[1]).__name__
            line["places"] = places(record.exc_info[1])
        self._lines.append(line)

    def add(self, text: str) -> None:
        """A line of our own, without a user's text."""
        self._lines.append(
            {"at": time.time(), "level": "INFO", "logger": "server", "message": text}
        )

    def lines(self) -> list[dict[str, Any]]:
        """Oldest first."""
        return list(self._lines)


def _message(record: logging.LogRecord) -> str:
    given = record.args
    if not given:
        return str(record.msg)
    try:
        if isinstance(given, dict):
            return str(record.msg) % {key: _safe(value) for key, value in given.items()}
        return str(record.msg) % tuple(_safe(value) for value in given)
    except (TypeError, ValueError):  # a template that its arguments do not fit
        return str(record.msg)


def _safe(value: object) -> object:
    if isinstance(value, int | float):
        return value
    return f"<{hashlib.sha256(str(value).encode()).hexdigest()[:12]}>"


def places(error: BaseException) -> list[str]:
    """``file:line function`` of the traceback, innermost last; files by their path in our code."""
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        name = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else Path(path.name)
        found.append(f"{name}:{frame.lineno} {frame.name}")
    return found
