"""Bytes through host memory as `comm.model` says them, counted in the calls that run."""

from __future__ import annotations

from fractions import Fraction

import pytest

from metainfer.comm import layout
from metainfer.comm.model import MIB, host_bytes, host_limit_us
from metainfer.comm.pieces import Slots, cut
from metainfer.comm.request import Op, Request
from metainfer.comm.rooms import host_slot_bytes


def counted(algorithm: str, world: int, size: int, rank: int) -> tuple[int, int]:
    """Down: what is left in the own slot. Up: what peers left there for this rank."""
    request = Request(op=Op.ALL_REDUCE, count=size // 2, dtype="bfloat16", world=world)
    slots = Slots(bytes=host_slot_bytes(world), shared=True)
    down = up = 0
    for piece in cut(request, algorithm, rank, slots):
        peers = [p for p in range(world) if p != rank]
        down += piece.in_len[peers[0]] if piece.same else sum(piece.in_len[p] for p in peers)
        up += len(peers) * piece.in_len[rank]
        if algorithm == "two_shot":
            down += piece.out_len[rank]
            up += sum(piece.out_len[p] for p in peers)
    return 2 * down, 2 * up


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_bytes_are_those_of_the_calls(algorithm: str, world: int) -> None:
    for size in (256 << 10, 64 * MIB):
        for rank in (0, world - 1):
            assert counted(algorithm, world, size, rank) == host_bytes(algorithm, world, size)


def test_the_limit_is_the_slowest_of_each_way_and_both() -> None:
    size = 64 * MIB
    both = float(Fraction(2 * size, 93_000))
    assert host_limit_us("one_shot", 2, size) == pytest.approx(both)
    assert host_limit_us("one_shot", 2, size, both=1e15) == pytest.approx(size / 55e9 * 1e6)
    up = 3 * size / 55e9 * 1e6
    assert host_limit_us("one_shot", 4, size) == pytest.approx(up)
    assert host_limit_us("two_shot", 4, size) < host_limit_us("one_shot", 4, size)


@pytest.mark.parametrize("groups", [(2,) * 5, (2, 2, 2, 4, 8)])
def test_the_slabs_of_a_layout_s_groups_stay_small(groups: tuple[int, ...]) -> None:
    """They are pinned for as long as the engine runs; staging memory is counted by itself."""
    slabs = (layout.slab_bytes(n, host_slot_bytes(n), shared=True) * n for n in groups)
    assert sum(slabs) < 56 << 20
