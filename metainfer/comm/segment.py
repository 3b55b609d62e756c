"""One shared-memory segment for a group of processes, which nobody can leave behind.

Rank 0 makes the file under ``/dev/shm`` complete and gives it its name at once; the others wait for
the name, map it and report in; when all have, rank 0 takes the name away. From then on the memory
goes with the last process. A rank that is killed before that leaves a name, which `sweep` (whoever
started the ranks calls it) removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from metainfer.core.errors import UserError

FOLDER = Path("/dev/shm")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Segment:
    """`size` bytes at `address`, shared by all that opened `token`."""

    def __init__(self, descriptor: int, size: int, path: Path) -> None:
        self._path = path
        self._map = mmap.mmap(descriptor, size)
        self._held = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._held)
        self.size = size

    @classmethod
    def create(cls, token: str, size: int, fill: Callable[[int], None]) -> Segment:
        """Make the segment; `fill(address)` puts it in order before anyone can see it.

        Raises:
            UserError: there is no room or no right, or the token is in use.
        """
        path, part = _path(token), _path(f"{token}.{os.getpid()}")
        try:
            descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)  # a full file system is no bus error later
                segment = cls(descriptor, size, path)
                fill(segment.address)
                os.link(part, path)
            finally:
                os.close(descriptor)
                part.unlink()
        except OSError as error:
            raise UserError(
                f"{size} B of shared memory cannot be had in {FOLDER}: {error.strerror}.",
                "Make room there, or give a container more of it (--shm-size).",
                code="no_shared_memory",
            ) from error
        return segment

    @classmethod
    def open(cls, token: str, size: int, deadline: float) -> Segment:
        """Wait until `deadline` (monotonic seconds) for the segment to be made, and map it.

        Raises:
            UserError: it was not made in time, or has another size.
        """
        path = _path(token)
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                break
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise UserError(
                        "rank 0 did not set up the shared memory of the group in time.",
                        "See why it did not start.",
                        code="rank_missing",
                    ) from None
                time.sleep(0.002)
        try:
            found = os.fstat(descriptor).st_size
            if found != size:
                raise UserError(
                    f"rank 0 made {found} B of shared memory where {size} B were expected.",
                    "Start all ranks with the same settings.",
                    code="ranks_disagree",
                )
            return cls(descriptor, size, path)
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Take the name away; the memory stays until the last process lets go."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap. No address into it may be used afterwards."""
        del self._held
        with contextlib.suppress(BufferError):  # someone still holds a view; it goes with that
            self._map.close()


def sweep(token: str) -> list[str]:
    """Remove what killed ranks left of `token`; the names that were there."""
    left = []
    for path in FOLDER.glob(f"{_path(token).name}*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            left.append(path.name)
    return left


def _path(token: str) -> Path:
    bare = token.partition(".")[0]
    if not _TOKEN.fullmatch(bare):
        raise ValueError(f"{token!r} is no token for shared memory")
    return FOLDER / f"metainfer-{token}"
