"""Collectives on slabs that GPUs reach: `local`, `ipc` and `host`, one kernel for all of them.

* `CudaLocalGroup`: virtual ranks of one process on one device, a stream each (`local`); slabs in
  device memory, or in pinned host memory as a stand-in for `host` with all ranks on one link.
* `open_host`: processes, slabs in registered shared host memory; no peer access needed.
* `open_ipc`: processes, slabs in device memory that peers map; needs peer access between devices.

A call is enqueued, not waited for: `check` (and every later `run`) raises what a kernel wrote down.
Kernels are compiled and loaded before the first live call and launched once dry (`warm`), since a
module that loads behind a spinning peer stalls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType

import torch
from torch import Tensor

from metainfer.comm import driver, layout, loader
from metainfer.comm.backends.calls import Caller, Rows, Side, checked, stripe
from metainfer.comm.backends.shm_cpu import ShmComm
from metainfer.comm.backends.slabs import gather_bytes
from metainfer.comm.errors import CommError
from metainfer.comm.layout import Code, ErrorRecord, Kind
from metainfer.comm.loader import Alone, Variant
from metainfer.comm.pieces import Piece, Slots, element_type
from metainfer.comm.plan import CommPlan
from metainfer.comm.request import Request
from metainfer.comm.rooms import SLOT_BYTES

BUDGET_S = 20.0
"""How long a peer is waited for while serving; what is captured has it for good."""
MAX_THREADS = 512
BLOCK_BYTES = 8 << 10
"""Of a stripe between slabs on cards."""
GRIDS = (
    (1 << 20, 16, 8),
    (512 << 10, 8, 4),
    (256 << 10, 16, 4),
    (128 << 10, 8, 1),
    (16 << 10, 4, 1),
)
"""Of calls through host memory: from how many bytes on, stripes, and groups of them that push in
turn. The fastest of two H200 without peer access (record 2026-11-30-2xh200-streams-fourth)."""
_STATE_BYTES = 4096
_modules: dict[tuple[Variant | Alone, str], driver.Module] = {}


def module(variant: Variant | Alone, device: int) -> driver.Module:
    """The loaded kernels of a variant, compiled if they are not in the cache.

    Raises:
        CudaError: they do not compile or load here.
    """
    major, minor = torch.cuda.get_device_capability(device)
    key = (variant, f"sm_{major}{minor}")
    if key not in _modules:
        cubin, verdict, _ = loader.build(variant, key[1])
        if cubin is None:
            raise driver.CudaError(verdict.reasons[0].message, "Install the CUDA compiler.")
        _modules[key] = driver.Module(cubin)
    return _modules[key]


class CudaComm(Caller):
    """One rank on a device. `slabs`: addresses as the device sees them; `closing` gives back what
    they stand for; `blocks` and `lag` as in a call, 0: by size."""

    device = "cuda"

    def __init__(
        self,
        rank: int,
        slabs: Sequence[int],
        slots: Slots,
        *,
        device: int,
        first_call: int = 0,
        clear: bool = True,
        budget_s: float = BUDGET_S,
        blocks: int = 0,
        lag: int = 0,
        threads: int = MAX_THREADS,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self._state_memory = torch.zeros(_STATE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
        self._record = torch.zeros(1024, dtype=torch.uint8).pin_memory()
        super().__init__(
            rank,
            slabs,
            slots,
            error=self._record.data_ptr(),
            state=self._state_memory.data_ptr(),
            budget_s=budget_s,
        )
        self.blocks, self.lag, self.threads = blocks, lag, threads
        self.index = device
        self.early = torch.cuda.get_device_capability(device) >= driver.EARLY_FROM
        self._closing = closing
        self._broken: CommError | None = None
        self._died: int | None = None
        self._word = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._functions: dict[tuple[int, bool, Kind], driver.Function] = {}
        if clear:
            self._clear(first_call)
        else:
            self._state_memory[:8].view(torch.int64).fill_(first_call)
            torch.cuda.synchronize(device)

    def _clear(self, calls: int) -> None:
        """Make the own slab one that has made `calls` calls; waits for the device."""
        clear = module(Variant(2, layout.BYTES), self.index).function("mi_clear")
        stream = torch.cuda.current_stream(self.index)
        values = [driver.u64(self._slabs[self.rank]), driver.u64(self._state), driver.u64(calls)]
        clear(1, 512, stream.cuda_stream, values)
        stream.synchronize()

    def warm(self, plan: CommPlan) -> None:
        """Load the plan's kernel and launch it once dry; to be done by all ranks, with a barrier
        after it, before the first live call."""
        stream = torch.cuda.current_stream(self.index).cuda_stream
        scratch = torch.zeros(1 << 20, dtype=torch.uint8, device=f"cuda:{self.index}")
        for call, piece in self.calls_of(plan)[:1]:
            function = self._function(plan.request, piece.kind)
            call.dry, kept = 1, list(call.in_len)
            call.in_len[:] = [0] * layout.WORLD
            lengths = list(call.out_len)
            call.out_len[:] = [0] * layout.WORLD
            call.input = call.output = scratch.data_ptr()
            function(1, self.threads, stream, [call])
            torch.cuda.synchronize(self.index)
            call.dry, call.in_len[:], call.out_len[:] = 0, kept, lengths

    def run(
        self,
        plan: CommPlan,
        given: Tensor,
        out: Tensor | None = None,
        *,
        side: Side | None = None,
        rows: Rows | None = None,
    ) -> Tensor:
        """Enqueue `plan` on the current stream; may be captured in a graph when warm.

        Raises:
            CommError: an earlier call failed.
        """
        self.check()
        request = plan.request
        out = checked(request, self.rank, given, out, "cuda")
        stream = torch.cuda.current_stream(self.index).cuda_stream
        for call, piece in self.calls_of(plan):
            self.fill(call, piece, request, given, out, side, rows)
            if request.captured:
                call.budget_ns = int(min(self.budget_s, BUDGET_S) * 1e9)
            blocks, call.lag = self._grid(piece, call.width)
            call.stripe = stripe(piece, blocks)
            function = self._function(request, piece.kind)
            function(blocks, self.threads, stream, [call], early=self.early)
        return out

    def _grid(self, piece: Piece, width: int) -> tuple[int, int]:
        """Stripes of a call, and how many groups of them push in turn: the same on all ranks, for
        flags are per stripe. By bytes of a stripe; in host memory as `GRIDS` has them."""
        size = (piece.in_len[0] if piece.same else sum(piece.in_len)) * width
        if piece.kind is Kind.COPY and piece.same:  # ranks bring parts of their own length
            size = sum(piece.out_len) * width
        if self.slots.shared:
            grids = ((stripes, turns) for least, stripes, turns in GRIDS if size >= least)
            blocks, lag = next(grids, (1, 1))
        else:
            wanted = 1 << max(0, (size - 1) // BLOCK_BYTES).bit_length()
            blocks, lag = min(layout.BLOCKS, wanted), 1
        return self.blocks or blocks, self.lag or lag

    def forms(self) -> Iterator[None]:
        """Give calls each grid that they may have: for a proof of all of them."""
        kept = self.blocks, self.lag
        try:
            yield
            for _, blocks, lag in GRIDS if self.slots.shared else ():
                self.blocks, self.lag = blocks, lag
                yield
        finally:
            self.blocks, self.lag = kept

    def check(self) -> None:
        """Raise what a kernel has written down; one look at host memory.

        Raises:
            CommError: the group is broken.
        """
        if self._broken is None:
            record = ErrorRecord.from_address(self._record.data_ptr())
            if record.code:
                self._broken = self._failure(record)
        if self._broken is not None:
            raise self._broken

    def _failure(self, record: ErrorRecord) -> CommError:
        peer, waited = int(record.peer), record.waited_ns / 1e9
        name = self._names.get(int(record.plan), f"plan {record.plan:06x}")
        head = f"{name} failed on rank {self.rank}"
        if record.code == Code.MISMATCH:
            return CommError(f"{head}: rank {peer} runs plan {record.seen >> 40:06x}.", peer=peer)
        if record.code == Code.ABORTED and self._died is not None:
            return CommError(f"{head}: rank {self._died} died.", peer=self._died)
        if record.code == Code.ABORTED:
            text = f"{head}: another rank gave up while rank {peer} was waited for."
            return CommError(text, peer=peer, secondary=True)
        text = f"{head}: rank {peer} did not answer for {waited:.1f} s in phase {record.phase}."
        return CommError(text, peer=peer)

    def died(self, peer: int) -> None:
        """Let this rank's kernels go: `peer` has died. From any thread."""
        self._died = peer
        self._tell(self.rank, layout.abort_word(Code.DIED, self.rank, peer))

    def abort(self) -> None:
        """Let every peer's kernels go: this rank gives up."""
        for rank in range(self.world):
            self._tell(rank, layout.abort_word(Code.RAISED, self.rank, self.rank))

    def _tell(self, rank: int, word: int) -> None:
        """Write an abort word beside kernels that may be waiting in this rank's stream. Slabs in
        host memory are the control group's, which has told them itself."""
        if self.slots.shared:
            return
        torch.cuda.set_device(self.index)  # a guard's thread has no context of its own
        slab = self._slabs[rank]
        self._word[0] = word - (1 << 64) if word >> 63 else word
        stream = self._aside.cuda_stream
        driver.copy_up(slab + layout.AT_ABORT, self._word.data_ptr(), 8, stream)
        self._aside.synchronize()

    def _function(self, request: Request, kind: Kind) -> driver.Function:
        key = (element_type(request), request.epilogue is not None, kind)
        if key not in self._functions:
            loaded = module(Variant(self.world, *key[:2]), self.index)
            self._functions[key] = loaded.function(layout.KERNELS[kind])
        return self._functions[key]

    def close(self) -> None:
        """Give back what this rank holds; the device must be done with its calls."""
        torch.cuda.synchronize(self.index)
        self._closing()
        self._closing = lambda: None
        self._broken = self._broken or CommError(f"rank {self.rank} is closed.", peer=self.rank)


class CudaLocalGroup:
    """`world` virtual ranks on one device, each to be used under its own of `streams`.

    `host_memory`: slabs in pinned host memory, one slot that all read, as `host` has it.
    """

    def __init__(
        self,
        world: int,
        *,
        device: int = 0,
        host_memory: bool = False,
        slot_bytes: int = SLOT_BYTES,
        first_call: int = 0,
        blocks: int = 0,
        lag: int = 0,
        threads: int = MAX_THREADS,
        budget_s: float = BUDGET_S,
    ) -> None:
        slots = Slots(bytes=slot_bytes, shared=host_memory)
        size = layout.slab_bytes(world, slot_bytes, shared=host_memory)
        if host_memory:
            self._memory = torch.zeros(world * size, dtype=torch.uint8).pin_memory()
        else:
            self._memory = torch.zeros(world * size, dtype=torch.uint8, device=f"cuda:{device}")
        base = self._memory.data_ptr()
        slabs = [base + rank * size for rank in range(world)]
        self.streams = tuple(
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(world)
        )
        self.ranks = tuple(
            CudaComm(
                rank,
                slabs,
                slots,
                device=device,
                first_call=first_call,
                blocks=blocks,
                lag=lag,
                threads=threads,
                budget_s=budget_s,
            )
            for rank in range(world)
        )

    def warm(self, plan: CommPlan) -> None:
        for comm in self.ranks:
            comm.warm(plan)

    def close(self) -> None:
        """Wait for the device and let go of the slabs."""
        for comm in self.ranks:
            comm.close()
        del self._memory

    def __enter__(self) -> CudaLocalGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_host(
    control: ShmComm, *, device: int, blocks: int = 0, budget_s: float = BUDGET_S
) -> CudaComm:
    """Backend `host` over the control group's own memory, pinned for the device.

    `control` must be `shared` and is not used for collectives of its own afterwards; its guard and
    its abort words go on serving this one. Collective.

    Raises:
        CudaError: the memory cannot be registered.
    """
    torch.zeros(1, device=f"cuda:{device}")
    base, size = control.memory
    on_device = driver.register_host(base, size)
    slabs = [on_device + (slab - base) for slab in control.slabs]
    return CudaComm(
        control.rank,
        slabs,
        control.slots,
        device=device,
        first_call=control.calls,
        clear=False,  # the control group has put the slabs in order, and may be ahead of us
        budget_s=budget_s,
        blocks=blocks,
        closing=lambda: driver.unregister_host(base),
    )


def open_ipc(
    control: ShmComm,
    make: Callable[[Request], CommPlan],
    *,
    device: int,
    slot_bytes: int = SLOT_BYTES,
    blocks: int = 0,
    budget_s: float = BUDGET_S,
) -> CudaComm:
    """Backend `ipc`: every rank allocates its slab and maps the peers'. Collective.

    `make` plans the byte exchanges over `control`.

    Raises:
        CudaError: a handle cannot be made or opened.
    """
    torch.zeros(1, device=f"cuda:{device}")
    slots = Slots(bytes=slot_bytes, shared=False)
    size = layout.slab_bytes(control.world, slot_bytes, shared=False)
    own = driver.allocate(size)
    with ExitStack() as held:
        held.callback(driver.free, own)
        held.callback(_part, control, make)  # memory goes when nobody maps it any more
        handles = gather_bytes(control, make, driver.export_memory(own))
        slabs = []
        for rank, handle in enumerate(handles):
            slabs.append(own if rank == control.rank else driver.import_memory(handle))
            if rank != control.rank:
                held.callback(driver.drop_memory, slabs[-1])
        comm = CudaComm(
            control.rank,
            slabs,
            slots,
            device=device,
            budget_s=budget_s,
            blocks=blocks,
        )
        gather_bytes(control, make, b"cleared")  # nobody writes before every slab is in order
        comm._closing = held.pop_all().close
    return comm


def _part(control: ShmComm, make: Callable[[Request], CommPlan]) -> None:
    """Wait until every rank has come here; a broken group does not."""
    with suppress(CommError):
        gather_bytes(control, make, b"dropped")
