"""Bytes of files brought into the page cache before they are needed, by a thread of its own.

A mapped file read by page faults waits for the disk a few pages at a time. Advice is a hint: a
system without ``posix_fadvise`` reads as it always did.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

CHUNK = 16 << 20
"""Bytes asked for at once."""

Span = tuple[Path, int, int]
"""A file, the first byte, and the byte after the last."""


def merged(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """`spans` in file order, those at most `gap` bytes apart joined, empty ones dropped."""
    found: list[Span] = []
    for path, start, stop in sorted(span for span in spans if span[1] < span[2]):
        if found and found[-1][0] == path and start <= found[-1][2] + gap:
            found[-1] = (path, found[-1][1], max(stop, found[-1][2]))
        else:
            found.append((path, start, stop))
    return found


class ReadAhead:
    """Brings in spans in the order in which they were asked for; `close` drops what is left."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._handles: dict[Path, int] = {}
        self._waiting: list[Future[None]] = []

    def want(self, spans: Iterable[Span]) -> None:
        """Ask for `spans`; returns at once."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._waiting = [future for future in self._waiting if not future.done()]
        for path, start, stop in merged(spans, gap=CHUNK):
            for place in range(start, stop, CHUNK):
                size = min(CHUNK, stop - place)
                self._waiting.append(self._pool.submit(self._bring, path, place, size))

    def settle(self) -> None:
        """Wait until all that was asked for has been passed on."""
        for future in self._waiting:
            future.result()

    def close(self) -> None:
        """Forget what was asked for and close the files; more may be asked for afterwards."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._waiting = []
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def _bring(self, path: Path, start: int, size: int) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        try:
            if path not in self._handles:
                self._handles[path] = os.open(path, os.O_RDONLY)
            os.posix_fadvise(self._handles[path], start, size, os.POSIX_FADV_WILLNEED)
        except OSError:
            return  # the read itself will say what is wrong
