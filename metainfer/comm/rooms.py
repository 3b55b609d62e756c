"""Bytes through which the ranks of a layout meet: one formula for who allocates and who plans."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.comm import layout
from metainfer.comm.peers import Place
from metainfer.comm.plan import AUTO
from metainfer.core.plan import LayoutPlan

SLOT_BYTES = 1 << 20
HOST_BYTES = 8 << 20
"""Of a small group's slots in host memory, all of it pinned; a layout has up to five groups."""
COUNTERS = 64 << 10
"""Of staging memory, in front of its parts."""
PROVEN = (1, 777, 70_001)
"""Elements of the messages that a backend has to get right before it is used."""
PROVEN_BYTES = 8 * PROVEN[-1]


@dataclass(frozen=True, slots=True)
class Room:
    """Of one rank: bytes on its card, and its part of what is pinned in host memory."""

    device: int
    pinned: int


def host_slot_bytes(world: int) -> int:
    """Payload of a slot in host memory: two for each of `world` ranks, `SLOT_BYTES` at least."""
    return max(SLOT_BYTES, HOST_BYTES // (2 * world))


def longest_bytes(planned: LayoutPlan, step_tokens: int, row_bytes: int) -> int:
    """Of the longest message: the rows of a step of every domain that meets at the experts."""
    met = planned.expert > planned.tensor
    return step_tokens * (planned.expert // planned.tensor if met else 1) * row_bytes


def part_bytes(world: int, longest: int) -> int:
    """Of one rank's part of the longest message that copy engines carry."""
    return -(-max(longest, PROVEN_BYTES) // world) + 4096


def staging_bytes(world: int, part: int) -> int:
    """Of a group's staging memory: counters, and a part for each owner from every rank."""
    return COUNTERS + world * world * part


def room_of(planned: LayoutPlan, longest: int, *, peers: bool, method: str = AUTO) -> Room:
    """What a rank takes to meet its groups: slabs in host memory or, among `peers`, on the cards;
    for copy engines parts of a message on the card and in staging memory.

    `method`: a backend that was asked for; what a library keeps for itself is not known here.
    """
    asked, device, pinned = method.partition(":")[0], 0, 0
    for members in set(Place(planned, 0).groups().values()):
        world = len(members)
        if asked in (AUTO, "host"):
            part = part_bytes(world, longest)
            device += world * part
            pinned += layout.slab_bytes(world, host_slot_bytes(world), shared=True)
            pinned += staging_bytes(world, part) // world
        elif asked == "shm_cpu":
            pinned += layout.slab_bytes(world, SLOT_BYTES, shared=True)
        if peers and asked in (AUTO, "ipc"):
            device += layout.slab_bytes(world, SLOT_BYTES, shared=False)
    return Room(device, pinned)
