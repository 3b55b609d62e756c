"""A rank's groups where it is alone: collectives are stand-ins, at the price of a named machine."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.comm.api import Communicator
from metainfer.comm.backends.emulated import EmulatedComm, HostWait, Price, Wait, Waited
from metainfer.comm.backends.emulated_card import DeviceWait
from metainfer.comm.model import host_bytes
from metainfer.comm.peers import Linked, Place, Ranks
from metainfer.comm.pieces import Slots
from metainfer.comm.plan import AUTO, CommPlan
from metainfer.comm.plan_offers import COPY, CUDA_BACKENDS, cuda_abilities, offers
from metainfer.comm.request import Op, Precision
from metainfer.comm.rooms import SLOT_BYTES, host_slot_bytes
from metainfer.comm.side import Pending, Turns
from metainfer.comm.topology import Topology


def _slots(world: int) -> dict[str, Slots]:
    """As `card_ranks` opens them."""
    return {
        "ipc": Slots(bytes=SLOT_BYTES, shared=False),
        "host": Slots(bytes=host_slot_bytes(world), shared=True),
    }


class EmulatedRanks:
    """Rank 0 of a layout on one device; `ranks` is for the model.

    `tree`: the links of the machine whose rank this is. `method`: which backend the price is of, as
    `Communicator` has it; NCCL's sums are of class `native`. `experts`: of a layer.

    Raises:
        CudaError: the device's kernels cannot be built or loaded.
    """

    def __init__(
        self,
        place: Place,
        tree: Topology,
        device: torch.device,
        *,
        method: str = AUTO,
        experts: int = 0,
        wait: Wait | None = None,
    ) -> None:
        on_device = device.type == "cuda"
        if wait is None:
            wait = DeviceWait(device.index or 0) if on_device else HostWait()
        self._wait = wait
        self._comms: dict[tuple[int, ...], Communicator] = {}
        found = {}
        for role, members in place.groups().items():
            if members not in self._comms:
                group = tree.group(len(members), place.layout.ranks)
                self._comms[members] = _communicator(wait, group, method, experts)
            found[role] = _Lone(
                0,
                len(members),
                self._comms[members],
                precision=Precision.NATIVE if method == "nccl" else Precision.EXACT,
                capturing=_capturing if on_device else lambda: False,
            )
        self.ranks = Ranks(**found, turns=Turns())

    @property
    def waited(self) -> Waited:
        """Of all collectives so far."""
        return self._wait.seen()

    def describe(self) -> dict[str, float]:
        """Share of calls by path, over all groups."""
        calls: dict[str, int] = {}
        for comm in self._comms.values():
            for path, count in comm.calls.items():
                calls[path] = calls.get(path, 0) + count
        return {path: count / sum(calls.values()) for path, count in sorted(calls.items())}


class _Lone(Linked):
    """As `Linked`; the stand-in is told which columns are numbers of experts."""

    def start_rows(self, x: Tensor, numbers: int = 0) -> Pending[Tensor]:
        return self._side.fork(self._rows(x, numbers=numbers))


def traffic(plan: CommPlan) -> tuple[int, int]:
    """Bytes that one rank puts on its link and takes from it (the table in ``model.py``)."""
    request, through_host = plan.request, plan.backend == "host"
    n, size = request.world, request.bytes
    ring = 2 * (n - 1) * size // n
    if request.op is Op.ALL_REDUCE:
        if through_host:
            down, up = host_bytes(plan.algorithm, n, size)
            return int(down), int(up)
        return ((n - 1) * size,) * 2 if plan.algorithm == "one_shot" else (ring, ring)
    part, rest = size // n, (n - 1) * size // n
    if request.op is Op.ALL_GATHER:
        return (part if through_host else (n - 1) * part), rest
    if request.op is Op.BROADCAST:
        return (size if through_host else (n - 1) * size), 0
    return rest, rest


def _communicator(wait: Wait, tree: Topology, method: str, experts: int) -> Communicator:
    able = cuda_abilities(tree, _slots(tree.world))

    def price(plan: CommPlan) -> Price:
        asked = f"{plan.backend}:{plan.algorithm}"
        (offer,) = (each for each in offers(plan.request, able, tree) if each.key == asked)
        assert offer.us is not None, f"{asked} has no price"
        return Price(offer.us, *traffic(plan), plan.algorithm == COPY)

    backend = EmulatedComm(wait, price, experts)
    names = (*CUDA_BACKENDS, f"host:{COPY}")
    found = Communicator(dict.fromkeys(names, backend), able, topology=tree, forced=method)
    found.agree_on_rules(lambda mine: [mine])
    return found


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()
