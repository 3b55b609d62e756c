"""Collectives on slabs in host memory: the part that processes and threads have in common.

`SlabComm` is one rank: it cuts a plan into calls, runs them through ``shm_cpu.c`` (which lets go of
the interpreter while it waits) and turns a code into a `CommError`. Two kinds of memory make two
backends: `shm_cpu` (processes, `backends/shm_cpu.py`) and `local` (threads of one process).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from metainfer.comm import layout
from metainfer.comm.backends.calls import Caller, Rows, Side, checked, stripe
from metainfer.comm.errors import CommError
from metainfer.comm.layout import Code, ErrorRecord
from metainfer.comm.pieces import Slots
from metainfer.comm.plan import CommPlan
from metainfer.comm.request import Op, Request
from metainfer.core.errors import InternalError
from metainfer.kernels import native

SOURCE = Path(__file__).parents[1] / "shm_cpu.c"
BUDGET_S = 30.0


def library() -> ctypes.CDLL:
    """The compiled protocol, once its numbers are known to be ours.

    Raises:
        NativeError: it cannot be built here.
    """
    found = native.load(SOURCE)
    found.mi_run.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)
    found.mi_run.restype = ctypes.c_uint64
    found.mi_clear.argtypes = found.mi_abort.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
    found.mi_clear.restype = found.mi_abort.restype = None
    numbers = (ctypes.c_uint64 * len(layout.CHECKED))()
    found.mi_layout(numbers)
    if tuple(numbers) != layout.CHECKED:
        raise InternalError(f"slab.h has {tuple(numbers)}, layout.py {layout.CHECKED}")
    return found


class SlabComm(Caller):
    """One rank of a group whose slabs lie at `slabs`, in this process's addresses.

    Not for two threads at once: a rank makes one call after another, as all its peers do.
    """

    def __init__(
        self,
        rank: int,
        slabs: Sequence[int],
        slots: Slots,
        *,
        budget_s: float = BUDGET_S,
        describe_peer: Callable[[int], str] = lambda peer: "",
    ) -> None:
        super().__init__(
            rank,
            slabs,
            slots,
            error=slabs[rank] + layout.AT_ERROR,
            state=slabs[rank] + layout.AT_CALLS,
            budget_s=budget_s,
        )
        self._library = library()
        self._describe_peer = describe_peer
        self._broken: CommError | None = None
        self._lock = threading.Lock()

    @property
    def calls(self) -> int:
        """Calls made, pieces counted one by one."""
        return self._word(self.rank, layout.AT_CALLS)

    def run(
        self,
        plan: CommPlan,
        given: Tensor,
        out: Tensor | None = None,
        *,
        side: Side | None = None,
        rows: Rows | None = None,
    ) -> Tensor:
        """Carry out `plan` on `given`; the result, in `out` if that is given.

        `out` may be `given` itself for an all_reduce and a broadcast.

        Raises:
            CommError: a peer died, left, raised, ran another plan or did not answer in time; all
                later calls raise the same.
        """
        request = plan.request
        if not self._lock.acquire(blocking=False):
            raise InternalError("two threads call one rank's collectives at once")
        try:
            if self._broken is not None:
                raise self._broken
            out = checked(request, self.rank, given, out)
            for call, piece in self.calls_of(plan):
                self.fill(call, piece, request, given, out, side, rows)
                call.stripe = stripe(piece, 1)
                code = self._library.mi_run(ctypes.byref(call), 0, 1)
                if code:
                    self._broken = self._failure(Code(code), plan)
                    raise self._broken
        finally:
            self._lock.release()
        return out

    def abort(self, cause: str, about: int | None = None) -> None:
        """Let every peer's wait end now: this rank gives up because of `cause`."""
        text = cause.encode("utf-8", "replace")[: layout.CAUSE - 1]
        ctypes.memmove(self._slabs[self.rank] + layout.AT_CAUSE, text + b"\0", len(text) + 1)
        word = layout.abort_word(Code.RAISED, self.rank, self.rank if about is None else about)
        for slab in self._slabs:
            self._library.mi_abort(slab, word)

    def tell(self, code: Code, peer: int) -> None:
        """Set the own abort word: something is known of `peer`."""
        word = layout.abort_word(code, self.rank, peer)
        self._library.mi_abort(self._slabs[self.rank], word)

    def _word(self, rank: int, offset: int) -> int:
        return int(ctypes.c_uint64.from_address(self._slabs[rank] + offset).value)

    def _failure(self, code: Code, plan: CommPlan) -> CommError:
        record = ErrorRecord.from_address(self._slabs[self.rank] + layout.AT_ERROR)
        head = f"{plan.request.name} failed on rank {self.rank} in call {self.calls}"
        if code is Code.ABORTED:
            return self._heard(head)
        peer = int(record.peer)
        if code is Code.MISMATCH:
            return CommError(
                f"{head}: rank {peer} runs plan {record.seen >> 40:06x}, this rank "
                f"{record.plan:06x}.",
                peer=peer,
            )
        if code is Code.LEFT:
            return CommError(f"{head}: rank {peer} has closed its communicator.", peer=peer)
        waited = record.waited_ns / 1e9
        about = self._describe_peer(peer)
        return CommError(
            f"{head}: rank {peer} did not answer for {waited:.1f} s in phase {record.phase}"
            f"{about}.",
            peer=peer,
        )

    def _heard(self, head: str) -> CommError:
        """The abort word said why."""
        code, rank, peer = layout.read_abort(self._word(self.rank, layout.AT_ABORT))
        if code is Code.DIED:
            return CommError(f"{head}: rank {peer} died{self._describe_peer(peer)}.", peer=peer)
        if code is Code.RAISED:
            raw = ctypes.string_at(self._slabs[rank] + layout.AT_CAUSE)
            text = raw.decode("utf-8", "replace")
            return CommError(f"{head}: rank {rank} gave up: {text}", peer=rank, secondary=True)
        what = {
            Code.TIMEOUT: "waited in vain for",
            Code.MISMATCH: "runs another plan than",
            Code.LEFT: "cannot go on without",
        }
        return CommError(
            f"{head}: rank {rank} {what[code]} rank {peer}.", peer=peer, secondary=True
        )


def gather_bytes(comm: SlabComm, make: Callable[[Request], CommPlan], mine: bytes) -> list[bytes]:
    """Everyone's bytes, in rank order: what `agree` needs. `make` plans a request."""
    world = comm.world
    sizes = torch.zeros(world, dtype=torch.int64)
    size = torch.tensor([len(mine)])
    comm.run(make(Request(op=Op.ALL_GATHER, count=world, dtype="int64", world=world)), size, sizes)
    room = int(sizes.max())
    if room == 0:
        return [b""] * world
    part = torch.zeros(room, dtype=torch.uint8)
    part[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else 0
    every = torch.zeros(world * room, dtype=torch.uint8)
    request = Request(op=Op.ALL_GATHER, count=world * room, dtype="uint8", world=world)
    comm.run(make(request), part, every)
    return [
        bytes(every[r * room : r * room + int(sizes[r])].numpy().tobytes()) for r in range(world)
    ]


def wait_until(test: Callable[[], bool], deadline: float) -> bool:
    """Poll `test` until it holds or `deadline` (monotonic seconds) has passed."""
    while not test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
