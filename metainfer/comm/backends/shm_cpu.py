"""Backend `shm_cpu`: processes of one host over memory that they share.

Every rank calls `ShmComm.open` with the same token; rank 0 hands the memory out until all are in. A
guard thread sees a peer's end and lets waits go; a wait without an answer ends after `budget_s`.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from metainfer.comm import layout
from metainfer.comm.backends.slabs import BUDGET_S, SlabComm, gather_bytes, library, wait_until
from metainfer.comm.errors import CommError
from metainfer.comm.guard import Guard
from metainfer.comm.layout import CLOSED, Code
from metainfer.comm.pieces import Slots
from metainfer.comm.plan import CommPlan
from metainfer.comm.request import Request
from metainfer.comm.segment import Asked, Segment
from metainfer.core.errors import InternalError

SLOT_BYTES = 1 << 20
OPEN_S = 60.0
_STALE_S = 1.0


class ShmComm(SlabComm):
    """One rank. Made by `open`; use as a context manager."""

    def __init__(
        self, rank: int, world: int, segment: Segment, slots: Slots, *, budget_s: float
    ) -> None:
        size = segment.size // world
        slabs = [segment.address + each * size for each in range(world)]
        super().__init__(rank, slabs, slots, budget_s=budget_s, describe_peer=self._state_of)
        self._segment: Segment | None = segment
        self._guard: Guard | None = None
        self.on_death: list[Callable[[int], None]] = []  # told of a peer that died, from any thread

    @classmethod
    def open(
        cls,
        token: str,
        rank: int,
        world: int,
        *,
        slot_bytes: int = SLOT_BYTES,
        shared: bool = True,
        budget_s: float = BUDGET_S,
        open_s: float = OPEN_S,
        first_call: int = 0,
    ) -> ShmComm:
        """Join the group `token` as `rank`; collective. Returns when all ranks are in.

        Raises:
            UserError: the memory cannot be had, or rank 0 is missing.
            CommError: another rank did not come within `open_s` seconds, or died.
        """
        deadline = time.monotonic() + open_s
        slots = Slots(bytes=slot_bytes, shared=shared)
        slab = layout.slab_bytes(world, slot_bytes, shared=shared)
        clear = library().mi_clear

        def fill(address: int) -> None:
            for each in range(world):
                clear(address + each * slab, first_call)

        if rank == 0:
            segment = Segment.create(token, world * slab, fill)
        else:
            segment = Segment.open(token, world * slab, deadline)
        comm = cls(rank, world, segment, slots, budget_s=budget_s)
        try:
            comm._meet(deadline)
        except BaseException:
            comm.close()
            raise
        finally:
            segment.withdraw()
        return comm

    def _meet(self, deadline: float) -> None:
        """Report in and wait for the others, then watch them."""
        self._set(self.rank, layout.AT_PID, os.getpid())
        others = [rank for rank in range(self.world) if rank != self.rank]
        for rank in others:
            if not wait_until(lambda r=rank: self._came(r), deadline):  # type: ignore[misc]
                raise CommError(
                    f"rank {rank} did not join the group of {self.world} ranks in time.", peer=rank
                )
        pids = {rank: self._word(rank, layout.AT_PID) for rank in others}
        self._guard = Guard(
            pids,
            beat=lambda now: self._set(self.rank, layout.AT_BEAT, now),
            closed=lambda peer: self._word(peer, layout.AT_BEAT) == CLOSED,
            died=self._died,
        )

    def _came(self, rank: int) -> bool:
        if self._segment is not None:
            self._segment.hand_out()
        return self._word(rank, layout.AT_PID) != 0

    def _died(self, peer: int) -> None:
        self.tell(Code.DIED, peer)
        for told in self.on_death:
            told(peer)

    def listen(self, what: str) -> None:
        """To be called while this rank does `what` by itself and a peer may be waited for.

        Raises:
            CommError: a peer died, gave up or left.
        """
        head = f"{what} failed on rank {self.rank}"
        if self._word(self.rank, layout.AT_ABORT):
            raise self._heard(head)
        for peer in range(self.world):
            if peer != self.rank and self._word(peer, layout.AT_BEAT) == CLOSED:
                raise CommError(f"{head}: rank {peer} has closed its communicator.", peer=peer)

    @property
    def memory(self) -> tuple[int, int]:
        """Address and size of the group's memory in this process."""
        if self._segment is None:
            raise InternalError(f"rank {self.rank} has closed its communicator")
        return self._segment.address, self._segment.size

    @property
    def slabs(self) -> tuple[int, ...]:
        """Every rank's slab, in this process's addresses."""
        return self._slabs

    def close(self) -> None:
        """Leave the group and unmap its memory. Idempotent; peers that call on see that we left."""
        if self._segment is None:
            return
        if self._guard is not None:
            self._guard.close()
        self._set(self.rank, layout.AT_BEAT, CLOSED)
        segment, self._segment = self._segment, None
        self._built.clear()
        self._broken = CommError(f"rank {self.rank} has closed its communicator.", peer=self.rank)
        segment.close()

    def _set(self, rank: int, offset: int, value: int) -> None:
        ctypes.c_uint64.from_address(self._slabs[rank] + offset).value = value

    def _state_of(self, peer: int) -> str:
        """What is known of a silent or dead peer, as the end of a sentence."""
        pid = self._word(peer, layout.AT_PID)
        beat = self._word(peer, layout.AT_BEAT)
        if not _exists(pid):
            return f" (process {pid})"
        age = (time.monotonic_ns() - beat) / 1e9
        if beat != CLOSED and age > _STALE_S:
            return f"; its process {pid} exists but has not run for {age:.1f} s"
        return f"; its process {pid} runs"

    def __enter__(self) -> ShmComm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def share(group: ShmComm, token: str, make: Callable[[Request], CommPlan], size: int) -> Segment:
    """More memory of all ranks of `group`, as `token`. Collective.

    `make` plans the exchanges in which ranks meet between the steps: so none waits for a rank that
    has failed, and all stand in line when rank 0 hands out; who stands there listens to the group.

    Raises:
        UserError: the memory cannot be had.
        CommError: another rank failed.
    """
    with ExitStack() as undone:
        if group.rank == 0:
            segment = Segment.create(token, size)
            undone.callback(segment.close)
            gather_bytes(group, make, b"")
            gather_bytes(group, make, b"")
            segment.hand_out()
        else:
            gather_bytes(group, make, b"")
            look = partial(group.listen, "sharing memory")
            asked = Asked(token, time.monotonic() + OPEN_S, look)
            undone.callback(asked.close)
            gather_bytes(group, make, b"")
            segment = asked.take(size)
            undone.callback(segment.close)
        gather_bytes(group, make, b"")
        undone.pop_all()
    segment.withdraw()
    return segment


def _exists(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be collected by its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
