"""A rank's groups over shared memory of one host: what ranks on a CPU open."""

from __future__ import annotations

from typing import Any

from metainfer.comm.api import Communicator
from metainfer.comm.backends.shm_cpu import ShmComm
from metainfer.comm.backends.slabs import gather_bytes
from metainfer.comm.peers import Linked, Place, Ranks
from metainfer.comm.plan_file import Tiers
from metainfer.comm.plan_offers import Ability
from metainfer.comm.side import Turns


class HostRanks:
    """This rank's groups over shared memory of the host; `ranks` is for the model.

    Collective: every rank of `token` opens it. `tiers`: measured ones.

    Raises:
        UserError, CommError: the memory cannot be had, or a rank is missing.
    """

    def __init__(self, token: str, place: Place, tiers: Tiers | None = None) -> None:
        self._opened: dict[tuple[int, ...], ShmComm] = {}
        self._linked: dict[tuple[int, ...], Linked] = {}
        for role, ranks in place.groups().items():
            if ranks not in self._opened:
                index = ranks.index(place.rank)
                name = f"{token}-{role}-{ranks[0]}"
                self._opened[ranks] = ShmComm.open(name, index, len(ranks))
        for ranks, comm in self._opened.items():
            self._linked[ranks] = Linked(comm.rank, comm.world, _communicator(comm, tiers))
        found = {role: self._linked[ranks] for role, ranks in place.groups().items()}
        self.ranks = Ranks(**found, turns=Turns())

    def settle(self) -> None:
        """Nothing changes once all are warm."""

    def check(self) -> None:
        """A failed call has raised itself."""

    def describe(self) -> dict[str, Any]:
        """By group: plans with what lost, and the share of calls by path."""
        return {
            "-".join(map(str, members)): link.comm.describe()
            for members, link in self._linked.items()
        }

    def abort(self, cause: str) -> None:
        """Let peers that wait for this rank go."""
        for comm in self._opened.values():
            comm.abort(cause)

    def close(self) -> None:
        for comm in self._opened.values():
            comm.close()


def _communicator(comm: ShmComm, tiers: Tiers | None) -> Communicator:
    able = [Ability(backend="shm_cpu", slots=comm.slots)]
    found = Communicator({"shm_cpu": comm}, able, tiers=tiers)
    found.agree_on_rules(lambda mine: gather_bytes(comm, found.plan, mine))
    return found
