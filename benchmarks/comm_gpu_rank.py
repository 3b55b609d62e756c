"""One rank process of `comm_gpu.py`: opens backends, verifies, times, and dies when told."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from metainfer.comm.backends.cuda import CudaComm, open_host, open_ipc
from metainfer.comm.backends.cuda_copy import open_copy
from metainfer.comm.backends.nccl import NcclComm
from metainfer.comm.backends.shm_cpu import ShmComm
from metainfer.comm.exact import canonical_sum
from metainfer.comm.plan import CommPlan, Offer, choose
from metainfer.comm.request import Op, Precision, Request, shard
from metainfer.comm.rooms import host_slot_bytes
from metainfer.workers.wire import RankFacts

COPY_PART = (32 << 20) + 4096


def plan_of(request: Request, algorithm: str, backend: str) -> CommPlan:
    return choose(request, [Offer(backend=backend, algorithm=algorithm)])


def message(
    size: int, world: int, backend: str, algorithm: str, op: Op = Op.ALL_REDUCE
) -> CommPlan:
    """A collective of `size` bytes in bfloat16."""
    precision = Precision.NATIVE if backend == "nccl" else Precision.EXACT
    request = Request(op=op, count=size // 2, dtype="bfloat16", world=world, precision=precision)
    return plan_of(request, algorithm, backend)


def values(rank: int, count: int, seed: int) -> torch.Tensor:
    """What `rank` brings; every rank can make every rank's."""
    generator = torch.Generator().manual_seed(seed * 8 + rank)
    found = torch.randn(count, generator=generator).to(torch.bfloat16)
    if count > 8:
        found[:4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")]).to(torch.bfloat16)
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.int16)


class Rank:
    """Made by `ProcessGroup`; `facts` names the device."""

    def __init__(self, facts: RankFacts) -> None:
        self.rank, self.world, self.token = facts.rank, facts.world, facts.token
        self.device = int(facts.facts["device"])
        torch.cuda.set_device(self.device)
        torch.zeros(1, device="cuda")
        self.comms: dict[str, Any] = {}
        self._controls: list[ShmComm] = []

    def _control(self, name: str, slot_bytes: int) -> ShmComm:
        control = ShmComm.open(f"{self.token}-{name}", self.rank, self.world, slot_bytes=slot_bytes)
        self._controls.append(control)
        return control

    def open(self, backend: str, blocks: int = 0, budget_s: float = 20.0) -> str:
        """Open one backend on all ranks."""
        if backend == "host":
            control = self._control("host", host_slot_bytes(self.world))
            self.comms[backend] = open_host(
                control, device=self.device, blocks=blocks, budget_s=budget_s
            )
        elif backend == "ipc":
            control = self._control("ipc", 1 << 16)
            self.comms[backend] = open_ipc(
                control,
                lambda request: plan_of(request, "direct", "shm_cpu"),
                device=self.device,
                slot_bytes=4 << 20,
                blocks=blocks,
                budget_s=budget_s,
            )
        elif backend == "copy":
            control = self._control("copy", 1 << 16)
            self.comms[backend] = open_copy(
                control,
                f"{self.token}-staging",
                lambda request: plan_of(request, "direct", "shm_cpu"),
                device=self.device,
                part_bytes=COPY_PART,
                budget_s=budget_s,
            )
        else:
            store = Path(tempfile.gettempdir(), f"nccl-{self.token}")
            self.comms[backend] = NcclComm(store, self.rank, self.world, device=self.device)
        return backend

    def shape(self, backend: str, options: dict[str, int]) -> None:
        """Form of the calls that follow, by attributes of the backend: `blocks`, `lag`, or
        `piece_bytes` and `by_streams` of copies; 0: by size."""
        for name, value in options.items():
            setattr(self.comms[backend], name, value)

    def warm(self, backend: str, algorithm: str, sizes: list[int]) -> None:
        comm = self.comms[backend]
        for size in sizes:
            if isinstance(comm, CudaComm):
                comm.warm(message(size, self.world, backend, algorithm))

    def verify(
        self, backend: str, algorithm: str, sizes: list[int], times: int, kind: str = "all_reduce"
    ) -> list[str]:
        """Bit equality with the canonical sum on fresh inputs and poisoned outputs; a gather's
        ranks bring their shards of it."""
        wrong, op = [], Op(kind)
        comm = self.comms[backend]
        for size in sizes:
            plan = message(size, self.world, backend, algorithm, op)
            own = slice(*shard(size // 2, self.world, self.rank))
            for turn in range(times):
                parts = [values(rank, size // 2, turn + size) for rank in range(self.world)]
                summed = canonical_sum(parts)
                given = (summed[own] if op is Op.ALL_GATHER else parts[self.rank]).cuda()
                wanted = summed[own] if op is Op.REDUCE_SCATTER else summed
                out = torch.full(wanted.shape, float("nan"), dtype=given.dtype, device="cuda")
                comm.run(plan, given, out)
                torch.cuda.synchronize()
                if not isinstance(comm, NcclComm):
                    comm.check()
                if not torch.equal(bits(out), bits(wanted)):
                    wrong.append(f"{backend} {algorithm} {kind} {size} B, turn {turn}")
        return wrong

    def time(
        self,
        backend: str,
        algorithm: str,
        size: int,
        repeat: int,
        graph: bool,
        kind: str = "all_reduce",
    ) -> dict[str, float]:
        """Microseconds per call: median and MAD over samples of `repeat` calls, which begin behind
        a call of the same kind, so ranks start together; `host_us`: until all were enqueued."""
        comm, op = self.comms[backend], Op(kind)
        plan = message(size, self.world, backend, algorithm, op)
        given = torch.randn(size // 2, device="cuda").to(torch.bfloat16)
        out = given if backend == "nccl" else torch.empty_like(given)
        own = slice(*shard(size // 2, self.world, self.rank))
        if op is Op.ALL_GATHER:
            given = given[own]
        elif op is Op.REDUCE_SCATTER:
            out = out[own]

        def calls() -> None:
            for _ in range(repeat):
                comm.run(plan, given, out)

        calls()
        torch.cuda.synchronize()
        step = calls
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                calls()
            step = captured.replay
        samples, enqueued = [], []
        for _ in range(9):
            step()  # in line with the peers from here on
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            asked = time.perf_counter()
            step()
            enqueued.append((time.perf_counter() - asked) * 1e6 / repeat)
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / repeat)
        middle = statistics.median(samples)
        mad = statistics.median(abs(x - middle) for x in samples)
        host = statistics.median(enqueued)
        return {"us": middle, "mad": mad, "n": len(samples), "host_us": host}

    def die(self, backend: str, rank: int) -> dict[str, object]:
        """`rank` is killed between two calls; the others say what they were told and when."""
        comm, plan = self.comms[backend], message(8192, self.world, backend, "one_shot")
        given = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(given)
        comm.run(plan, given, out)
        torch.cuda.synchronize()
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        comm.run(plan, given, out)
        torch.cuda.synchronize()
        comm.check()
        return {"error": "", "s": time.monotonic() - begin}

    def abort(self, cause: str) -> None:
        for control in self._controls:
            control.abort(cause)

    def close(self) -> None:
        torch.cuda.synchronize()
        for comm in self.comms.values():
            if hasattr(comm, "close"):
                comm.close()
        for control in self._controls:
            control.close()
