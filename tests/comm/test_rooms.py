"""Bytes through which ranks meet: as they are allocated, and by hand for some layouts."""

from __future__ import annotations

import pytest

from metainfer.comm import layout
from metainfer.comm.backends.copy_order import Staging
from metainfer.comm.rooms import (
    PROVEN_BYTES,
    Room,
    host_slot_bytes,
    longest_bytes,
    part_bytes,
    room_of,
    staging_bytes,
)
from metainfer.core.plan import LayoutPlan

EP8 = LayoutPlan(name="ep8", data=8, expert=8)
TP2EP4 = LayoutPlan(name="2xtp2ep4", tensor=2, data=4, expert=4)
PAIR = LayoutPlan(name="cp8/tp8", tensor=8, expert=8, prefill=8)
STEP, ROW = 8192, 4096 * 2


def slab(world: int) -> int:
    return layout.slab_bytes(world, host_slot_bytes(world), shared=True)


def test_the_longest_message_has_the_rows_of_all_domains_that_meet() -> None:
    assert longest_bytes(EP8, STEP, ROW) == 8 * STEP * ROW
    assert longest_bytes(TP2EP4, STEP, ROW) == 2 * STEP * ROW
    assert longest_bytes(PAIR, STEP, ROW) == STEP * ROW
    assert part_bytes(8, longest_bytes(EP8, STEP, ROW)) == STEP * ROW + 4096
    assert part_bytes(2, 0) == PROVEN_BYTES // 2 + 4096  # what is proven at start has room


def test_every_group_has_its_own_by_hand() -> None:
    """One of all eight; three of four, two and two; a pair's ranks of prompts are its tensor's."""
    longest = longest_bytes(EP8, STEP, ROW)
    part = longest // 8 + 4096
    assert room_of(EP8, longest, peers=False) == Room(
        8 * part, slab(8) + ((64 << 10) + 64 * part) // 8
    )
    longest = longest_bytes(TP2EP4, STEP, ROW)
    parts = {world: longest // world + 4096 for world in (4, 2)}
    found = room_of(TP2EP4, longest, peers=False)
    assert found.device == 4 * parts[4] + 2 * 2 * parts[2]
    staged = sum(((64 << 10) + w * w * parts[w]) // w for w in (4, 2, 2))
    assert found.pinned == staged + slab(4) + 2 * slab(2)
    one = room_of(PAIR, longest_bytes(PAIR, STEP, ROW), peers=False)
    assert one.device == STEP * ROW + 8 * 4096
    assert room_of(LayoutPlan(name="8x", data=8), 0, peers=True) == Room(0, 0)


def test_peers_have_slabs_on_the_card_and_what_was_asked_for_is_all_there_is() -> None:
    both = room_of(EP8, STEP * ROW, peers=True)
    host = room_of(EP8, STEP * ROW, peers=True, method="host")
    peers = room_of(EP8, STEP * ROW, peers=True, method="ipc")
    assert peers == Room(layout.slab_bytes(8, 1 << 20, shared=False), 0)
    assert both == Room(host.device + peers.device, host.pinned)
    assert host == room_of(EP8, STEP * ROW, peers=False)
    assert room_of(EP8, STEP * ROW, peers=True, method="nccl") == Room(0, 0)
    memory = room_of(EP8, STEP * ROW, peers=False, method="shm_cpu")
    assert memory == Room(0, layout.slab_bytes(8, 1 << 20, shared=True))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_staging_memory_is_as_large_as_its_last_part_ends(world: int) -> None:
    part = part_bytes(world, 3 << 20)
    staging = Staging(0, 0, world, part)
    assert staging.part(world - 1, world - 1) + part == staging_bytes(world, part)
