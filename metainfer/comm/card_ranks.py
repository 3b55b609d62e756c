"""A rank's groups between cards: what ranks with a CUDA device each open, and agree on.

Every group has a control group in host memory: over it ranks compare what they could open, and its
guard sees a peer's end. A backend counts only where every rank opened it, with the reasons of those
that did not. Kernels are loaded and launched dry before the first live call: a module that loads
behind a spinning peer stalls it. Ranks of one device (`sharing`) meet in its memory; time slices
make them slow, so that is for tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

from metainfer.comm.api import Backend, Communicator
from metainfer.comm.backends.calls import DTYPES
from metainfer.comm.backends.cuda import (
    BUDGET_S,
    CudaComm,
    open_host,
    open_ipc,
)
from metainfer.comm.backends.cuda_copy import CopyRank, open_copy
from metainfer.comm.backends.nccl import NcclComm
from metainfer.comm.backends.shm_cpu import ShmComm
from metainfer.comm.backends.slabs import gather_bytes
from metainfer.comm.errors import CommError
from metainfer.comm.exact import canonical_sum
from metainfer.comm.peers import Linked, Place, Ranks
from metainfer.comm.pieces import ALGORITHMS
from metainfer.comm.plan import AUTO, CommPlan, Offer, choose
from metainfer.comm.plan_file import Tiers
from metainfer.comm.plan_offers import COPIED, COPY, Ability, cuda_abilities
from metainfer.comm.request import ELEMENT_BYTES, Op, Precision, Request, shard
from metainfer.comm.rooms import PROVEN, host_slot_bytes, part_bytes
from metainfer.comm.side import Turns
from metainfer.comm.topology import Topology
from metainfer.core.errors import UserError
from metainfer.core.verdict import ACCEPT, Reason, Verdict, reject

WARM_S = 300.0
"""How long a peer is waited for until all are warm: one may be compiling."""
CONTROL_BYTES = 1 << 16
HOST_COPY = f"host:{COPY}"
OPENED = ("ipc", "host", HOST_COPY, "nccl")
ON_REQUEST = reject("on-request", "opened only when it is asked for: --collectives nccl")


class CardRanks:
    """This rank's groups; `ranks` is for the model. Collective: every rank of `token` opens it.

    `tree`: the links of all cards of the layout; `method`: ``auto`` or a backend; `tiers`: measured
    ones; `dtype`: of the sums; `most_bytes`: of the longest sum; `sharing`: all ranks are on this
    very device; `turns`: where calls go that a model starts.

    Raises:
        UserError, CommError: a rank is missing, or nothing could be opened; with every reason.
    """

    def __init__(
        self,
        token: str,
        place: Place,
        tree: Topology,
        device: torch.device,
        *,
        dtype: str,
        most_bytes: int,
        method: str = AUTO,
        tiers: Tiers | None = None,
        sharing: bool = False,
        turns: Turns | None = None,
    ) -> None:
        torch.cuda.set_device(device)
        self._groups: dict[tuple[int, ...], _Group] = {}
        found, turns = {}, turns or Turns()
        for role, members in place.groups().items():
            if members not in self._groups:
                every = len(members) == place.layout.ranks
                group = _Group(f"{token}-{role}-{members[0]}", members.index(place.rank), members)
                self._groups[members] = group
                group.open(
                    tree.group(len(members), place.layout.ranks),
                    device.index or 0,
                    wanted=_wanted(method, tree, every=every, sharing=sharing),
                    part_bytes=part_bytes(len(members), most_bytes),
                )
                group.prove(dtype)
                group.start(method, tiers or {})
            found[role] = self._groups[members].linked(method, turns)
        self.ranks = Ranks(**found, turns=turns)

    def settle(self) -> None:
        """All ranks are warm: from now on a peer that does not come in time is a failure."""
        for group in self._groups.values():
            for comm in group.opened.values():
                if isinstance(comm, CudaComm | CopyRank):
                    comm.budget_s = BUDGET_S

    def check(self) -> None:
        """Raise what a kernel has written down; to be called once results are here.

        Raises:
            CommError: a collective failed: which, how large, waiting for whom.
        """
        for group in self._groups.values():
            for comm in group.opened.values():
                if isinstance(comm, CudaComm | CopyRank):
                    comm.check()

    def describe(self) -> dict[str, Any]:
        """By group: plans with what lost, the share of calls by path, and why the interpreter
        enqueues copies where it does."""
        return {
            "-".join(map(str, members)): group.describe() for members, group in self._groups.items()
        }

    def abort(self, cause: str) -> None:
        """Let peers that wait for this rank go."""
        for group in self._groups.values():
            group.abort(cause)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


class _Group:
    """One group of ranks: its control groups, the backends that all could open, a communicator."""

    def __init__(self, name: str, index: int, members: tuple[int, ...]) -> None:
        self.name, self.index, self.members = name, index, members
        self.opened: dict[str, Backend] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._controls: list[ShmComm] = []
        self._control = self._join("plans", CONTROL_BYTES)
        self._plan = _planner(self._control)
        self.comm: Communicator

    def open(
        self, tree: Topology, device: int, *, wanted: Mapping[str, Verdict], part_bytes: int
    ) -> None:
        """Try each backend that is wanted; keep what every rank could open."""
        self._tree, self._most = tree, part_bytes * len(self.members)
        for name in OPENED:
            mine = wanted[name]
            if mine.accepted:
                mine = self._try(name, device, part_bytes)
            self._verdicts[name] = self._together(name, mine)
            if not self._verdicts[name].accepted and name in self.opened:
                self._quietly(self.opened.pop(name).close)

    def prove(self, dtype: str) -> None:
        """Launch every kernel once dry, then compare sums with the canonical one: a backend that
        gives wrong bytes is fast, and is not used."""
        for name, comm in self.opened.items():
            if isinstance(comm, CudaComm):
                for plan in _first_plans(name, len(self.members), dtype):
                    comm.warm(plan)
        self._exchange(b"warm")
        for name, comm in list(self.opened.items()):
            if not isinstance(comm, CudaComm | CopyRank):
                continue
            found = wrong_results(comm, name, dtype)
            self._verdicts[name] = self._together(name, found)
            if not self._verdicts[name].accepted:
                self._quietly(self.opened.pop(name).close)

    def start(self, method: str, tiers: Tiers) -> None:
        """Make the communicator and compare its rules."""
        slots = {
            name: comm.slots for name, comm in self.opened.items() if isinstance(comm, CudaComm)
        }
        gates = {
            name: verdict
            for name, verdict in self._verdicts.items()
            if name != "ipc" or self._tree.peer is True  # else the tree says it
        }
        able = cuda_abilities(self._tree, slots, gates, self._most)
        self.comm = Communicator(self.opened, able, topology=self._tree, tiers=tiers, forced=method)
        self.comm.agree_on_rules(self._exchange)
        for comm in self.opened.values():
            if isinstance(comm, CudaComm | CopyRank):
                comm.budget_s = WARM_S

    def linked(self, method: str, turns: Turns) -> Linked:
        return Linked(
            self.index,
            len(self.members),
            self.comm,
            precision=Precision.NATIVE if method == "nccl" else Precision.EXACT,
            capturing=torch.cuda.is_current_stream_capturing,
            side=turns,
        )

    def describe(self) -> dict[str, object]:
        copies, found = self.opened.get(HOST_COPY), self.comm.describe()
        if isinstance(copies, CopyRank):
            found["interpreted"] = [reason.message for reason in copies.enqueue.refused.reasons]
        return found

    def abort(self, cause: str) -> None:
        for control in self._controls:
            control.abort(cause)
        for comm in self.opened.values():
            if isinstance(comm, CudaComm):
                comm.abort()
            elif isinstance(comm, CopyRank):
                for rank in range(comm.world):
                    comm.abort(rank)

    def close(self) -> None:
        for comm in reversed(list(self.opened.values())):
            comm.close()
        for control in reversed(self._controls):
            control.close()

    def _join(self, what: str, slot_bytes: int) -> ShmComm:
        control = ShmComm.open(
            f"{self.name}-{what}", self.index, len(self.members), slot_bytes=slot_bytes
        )
        self._controls.append(control)
        return control

    def _try(self, name: str, device: int, part_bytes: int) -> Verdict:
        """Open one backend over a control group of its own: a failure breaks nothing else."""
        if name == "nccl":
            store = Path(gettempdir(), f"nccl-{self.name}")
            return self._attempt(
                name, lambda: NcclComm(store, self.index, len(self.members), device=device)
            )
        word = name.replace(":", "-")
        slot = host_slot_bytes(len(self.members)) if name == "host" else CONTROL_BYTES
        control = self._join(word, slot)
        plan = _planner(control)

        def make() -> Backend:
            if name == "host":
                return open_host(control, device=device, budget_s=BUDGET_S)
            if name == "ipc":
                return open_ipc(control, plan, device=device, budget_s=BUDGET_S)
            return open_copy(
                control,
                f"{self.name}-staging",
                plan,
                device=device,
                part_bytes=part_bytes,
                budget_s=BUDGET_S,
            )

        found = self._attempt(name, make)
        if not found.accepted:
            control.abort(found.reasons[0].message)
        comm = self.opened.get(name)
        if isinstance(comm, CudaComm):
            control.on_death.append(comm.died)
        elif isinstance(comm, CopyRank):
            control.on_death.append(lambda peer: comm.abort())
        return found

    def _attempt(self, name: str, make: Callable[[], Backend]) -> Verdict:
        try:
            self.opened[name] = make()
        except (UserError, CommError, RuntimeError) as error:
            return reject("open", " ".join(str(error).split()))
        return ACCEPT

    def _together(self, name: str, mine: Verdict) -> Verdict:
        """Everyone's verdict; a reason that not all have names its rank."""
        said = json.dumps([[reason.code, reason.message] for reason in mine.reasons])
        every = [json.loads(body) for body in self._exchange(said.encode())]
        if all(reasons == every[0] for reasons in every):
            return Verdict(tuple(Reason(code, text) for code, text in every[0]))
        return Verdict(
            tuple(
                Reason(code, f"rank {self.members[rank]}: {text}")
                for rank, reasons in enumerate(every)
                for code, text in reasons
            )
        )

    def _exchange(self, mine: bytes) -> list[bytes]:
        return gather_bytes(self._control, self._plan, mine)

    def _quietly(self, step: Callable[[], None]) -> None:
        """A backend that not everyone has is closed; what it waits for then does not come."""
        try:
            step()
        except (UserError, CommError, RuntimeError):
            return


def _wanted(method: str, tree: Topology, *, every: bool, sharing: bool) -> dict[str, Verdict]:
    """Which backends to open, and why the others are not, from what all ranks share."""
    peer = ACCEPT
    if tree.peer is not True and not sharing:
        text = "cards may not write into each other"
        if tree.peer is None:
            text = "whether cards may write into each other is not known"
        peer = reject("peer", text)
    nccl = ON_REQUEST
    if method == "nccl":
        nccl = ACCEPT
        if not every:
            nccl = reject("groups", "nccl serves one group of all ranks, and there are several")
        elif sharing:
            nccl = reject("device", "nccl wants a device for every rank")
    found = {"ipc": peer, "host": ACCEPT, HOST_COPY: ACCEPT, "nccl": nccl}
    asked = method.partition(":")[0]
    for name, verdict in found.items():
        if asked not in (AUTO, name.partition(":")[0]) and verdict.accepted:
            found[name] = reject("forced", f"{method} was asked for")
    return found


def _planner(control: ShmComm) -> Callable[[Request], CommPlan]:
    """Plans of byte exchanges over a control group."""
    able = [Ability(backend="shm_cpu", slots=control.slots)]
    return Communicator({"shm_cpu": control}, able).plan


def _first_plans(backend: str, world: int, dtype: str) -> list[CommPlan]:
    """One small call for each kernel that a model meets: sums of its type, of float32, and copies
    of bytes."""
    found = []
    for op, kind in ((Op.ALL_REDUCE, dtype), (Op.ALL_REDUCE, "float32"), (Op.ALL_GATHER, dtype)):
        count = 64 * world // ELEMENT_BYTES[kind]
        request = Request(op=op, count=count, dtype=kind, world=world)
        offer = Offer(backend=backend, algorithm=ALGORITHMS[op][0])
        found.append(choose(request, [offer]))
    return found


def wrong_results(comm: CudaComm | CopyRank, name: str, dtype: str) -> Verdict:
    """Whether `comm` sums as `canonical_sum` does, and copy engines gather and scatter so too: to
    the bit, on odd lengths with poisoned results, and the longest of them in every form that calls
    may take; sums in place too. Collective."""
    methods = [(Op.ALL_REDUCE, each) for each in ALGORITHMS[Op.ALL_REDUCE]]
    if isinstance(comm, CopyRank):
        methods = [(op, COPY) for op in COPIED]
    for turn, count in enumerate(PROVEN):
        parts = [_drawn(each, count, turn, DTYPES[dtype]) for each in range(comm.world)]
        for op, method in methods:
            request = Request(op=op, count=count, dtype=dtype, world=comm.world)
            plan = choose(request, [Offer(backend=name.partition(":")[0], algorithm=method)])
            longest = count == PROVEN[-1] and method != "two_shot"
            for form, _ in enumerate(comm.forms() if longest else [None]):
                in_place = op is Op.ALL_REDUCE and form % 2 == 1
                try:
                    right = _gives(comm, plan, parts, in_place=in_place)
                except CommError as error:
                    return reject("failed", f"{name} {method}: {error.cause}")
                if not right:
                    text = f"{name} {method} gave wrong bytes at {count} elements"
                    return reject("wrong", f"{text} of {op}{' in place' * in_place}")
    return ACCEPT


def _gives(
    comm: CudaComm | CopyRank, plan: CommPlan, parts: Sequence[torch.Tensor], *, in_place: bool
) -> bool:
    """Whether a call gives what it should, of each rank's `parts` or of their sum."""
    op, mine = plan.request.op, parts[comm.rank]
    wanted = summed = canonical_sum(parts)
    own = slice(*shard(plan.request.count, comm.world, comm.rank))
    if op is Op.ALL_GATHER:
        mine = summed[own]
    elif op is Op.REDUCE_SCATTER:
        wanted = summed[own]
    given = torch.empty(len(mine), dtype=mine.dtype, device=f"cuda:{comm.index}")
    given.copy_(mine)
    out = given
    if not in_place:
        out = torch.full(wanted.shape, float("nan"), dtype=mine.dtype, device=given.device)
    comm.run(plan, given, out)
    torch.cuda.current_stream(comm.index).synchronize()
    comm.check()
    return torch.equal(out.cpu().view(torch.uint8), wanted.view(torch.uint8))


def _drawn(rank: int, count: int, turn: int, kind: torch.dtype) -> torch.Tensor:
    """What `rank` brings, as every rank can make it; with zeros of both signs and infinity."""
    drawn = torch.Generator().manual_seed(8 * turn + rank)
    found = torch.randn(count, generator=drawn).to(kind)
    found[:3] = torch.tensor([0.0, -0.0, float("inf")], dtype=kind)[:count]
    return found
