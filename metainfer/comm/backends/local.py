"""Backend `local` in host memory: several virtual ranks in one process, one thread each.

The same protocol and the same code as between processes, on memory of this process; for tests and
for layouts of several ranks on a developer's machine.
"""

from __future__ import annotations

import ctypes
import mmap
from types import TracebackType

from metainfer.comm import layout
from metainfer.comm.backends.slabs import BUDGET_S, SlabComm, library
from metainfer.comm.pieces import Slots

SLOT_BYTES = 1 << 20


class LocalGroup:
    """`world` ranks; `ranks[r].run` is for one thread per rank. Use as a context manager."""

    def __init__(
        self,
        world: int,
        *,
        slot_bytes: int = SLOT_BYTES,
        shared: bool = True,
        budget_s: float = BUDGET_S,
        first_call: int = 0,
    ) -> None:
        slots = Slots(bytes=slot_bytes, shared=shared)
        size = layout.slab_bytes(world, slot_bytes, shared=shared)
        self._map = mmap.mmap(-1, world * size)
        self._held = ctypes.c_char.from_buffer(self._map)
        base = ctypes.addressof(self._held)
        slabs = [base + rank * size for rank in range(world)]
        clear = library().mi_clear
        for slab in slabs:
            clear(slab, first_call)
        self.ranks = tuple(SlabComm(rank, slabs, slots, budget_s=budget_s) for rank in range(world))

    def close(self) -> None:
        """Give the memory back; no rank may be used afterwards."""
        if not self._map.closed:
            del self._held
            self._map.close()

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
