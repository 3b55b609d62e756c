"""What a verb gives back, and how it reaches standard output.

With ``--json`` standard output carries exactly one document: while the verb runs, file descriptor
1 points to standard error, so that not even a C library can print beside it.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO


def can_take(stream: TextIO) -> bool:
    """Whether a line can be written now; a pipe that nobody reads would hold up who writes."""
    try:
        poller = select.poll()
        poller.register(stream.fileno(), select.POLLOUT)
        return any(event & select.POLLOUT for _, event in poller.poll(0))
    except (OSError, ValueError):  # not a descriptor: a buffer takes everything
        return not stream.closed


class PatientHandler(logging.StreamHandler[TextIO]):
    """Log lines that are dropped where writing them would hold up the program."""

    def emit(self, record: logging.LogRecord) -> None:
        if can_take(self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """A disk that is full: the line is lost, and saying so would be, too."""


@dataclass(frozen=True, slots=True)
class Result:
    """`document` for ``--json``, `text` for people (empty: the verb has printed), exit `code`."""

    document: Mapping[str, object] = field(default_factory=dict)
    text: str = ""
    code: int = 0


class Output:
    """Where one run of the command line prints."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._descriptor = -1
        self._printed = False

    @contextmanager
    def guard(self) -> Iterator[None]:
        """With ``--json``: everything but `document` goes to standard error."""
        if not self.as_json:
            yield
            return
        sys.stdout.flush()
        self._descriptor = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(self._descriptor, 1)
            os.close(self._descriptor)
            self._descriptor = -1

    def document(self, document: Mapping[str, object]) -> None:
        """Print the one document; a second call is ignored (the first, an answer, stands)."""
        if self._printed:
            return
        self._printed = True
        data = (json.dumps(document, ensure_ascii=False, default=str) + "\n").encode()
        target = self._descriptor if self._descriptor >= 0 else 1
        while data:
            data = data[os.write(target, data) :]

    def finish(self, result: Result) -> int:
        """Print `result`; returns its exit code."""
        if self.as_json:
            self.document(result.document)
        elif result.text:
            print(result.text, flush=True)
        return result.code


current = Output(False)
"""The output of this run; `main` replaces it."""
