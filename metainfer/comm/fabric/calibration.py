"""Published and own timings that the simulator is held to, each with the machine it ran on.

A row's machine is a tree and the seeds of its kernel. Where those differ from ours the difference
is fitted to that row and said in `fitted`; everything else is the one set of seeds in `model.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from metainfer.comm.fabric import schedules
from metainfer.comm.fabric.events import Transfer, simulate
from metainfer.comm.fabric.network import HOST, move, network
from metainfer.comm.model import KIB, MIB, SEEDS, Costs
from metainfer.comm.topology import Topology, no_peer, one_switch, root_ports, tree

Algorithm = Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`points`: message bytes -> measured microseconds. `predict(bytes)`: simulated."""

    name: str
    source: str
    points: dict[int, float]
    predict: Algorithm
    fitted: str = ""


def _on(topology: Topology, name: str, costs: Costs = SEEDS) -> Algorithm:
    return lambda size: schedules.run(name, topology, size, costs).us


def _less_tuned(size: int) -> float:
    """One-shot at 0.4 of the port and 1.4 us more to start."""
    costs = dataclasses.replace(SEEDS, floor=4.4)
    return schedules.run("one_shot", one_switch(4), round(size / 0.4), costs).us


def _sentinel(size: int) -> float:
    """Data is its own flag at once its width: a one-way trip of what `ll` carries twice."""
    slow = tree(["plx"] * 4, [0] * 4, link_bytes_s=12e9 * 0.75 / 3**-0.46)
    costs = dataclasses.replace(SEEDS, floor=1.9)
    return schedules.run("ll", slow, size // 2, costs).us


def _best_of_island(size: int) -> float:
    quick = dataclasses.replace(SEEDS, floor=1.5)
    near = dataclasses.replace(root_ports(8, 2), root_us=0.7)
    names = ("island", "island_ll") if size <= SEEDS.ll_limit else ("island",)
    return min(schedules.run(name, near, size, quick).us for name in names)


def _gather(world: int, us: float = 0.0) -> Algorithm:
    """Every rank writes its part to all others, carrying its own flags."""
    return lambda size: schedules.run("ll", one_switch(world), size, SEEDS).us + us


def _gather_large(size: int) -> float:
    """Two ranks, one pass each at the staged share."""
    return _two_ways(size, SEEDS.staged)


def _two_ways(size: int, share: float) -> float:
    plan = [Transfer(delay_us=SEEDS.floor)]
    pair = one_switch(2)
    for source in range(2):
        plan.append(move(pair, source, 1 - source, size, after=(0,), share=share))
    return simulate(plan, network(pair)).us


def _host_shared(size: int) -> float:
    """Two ranks on one card, so on one link."""
    one = no_peer(1, dram_bytes_s=1e12)
    return simulate(schedules.host_one_shot(one, size, cards=(0, 0)), network(one)).us


def _host_loop(size: int) -> float:
    one = no_peer(1, dram_bytes_s=1e12)
    times = [
        simulate(schedules.host_copy_loop(one, size, pieces=pieces), network(one)).us
        for pieces in (1, 2, 4, 8, 16)
    ]
    return min(times)


ROWS: tuple[Row, ...] = (
    Row(
        name="one-shot, 4 ranks, one switch chip",
        source="rtx6kpro, ASUS Broadcom",
        points={KIB: 6.1, 64 * KIB: 11.8, 256 * KIB: 28.7, 512 * KIB: 51.0, MIB: 95.6},
        predict=_on(one_switch(4), "one_shot"),
    ),
    Row(
        name="one-shot, 4 ranks, Microchip board",
        source="rtx6kpro, wrx90",
        points={KIB: 7.5, 64 * KIB: 24.6, 128 * KIB: 40.0},
        predict=_less_tuned,
        fitted="a kernel less tuned there: 0.4 of the port, 1.4 us more to start",
    ),
    Row(
        name="sentinel push, 4 ranks, PCIe 3.0 PLX",
        source="haohervchb/sglang-V100#2",
        points={4 * KIB: 4.0, 16 * KIB: 7.2, 128 * KIB: 44.5, 384 * KIB: 120.0},
        predict=_sentinel,
        fitted="12 GB/s links of which three senders get 0.75 (published), floor 1.9 us",
    ),
    Row(
        name="staged or island, 8 ranks on root ports",
        source="SGLang pcie_ipc_ar notes",
        points={12 * KIB: 5.3, 96 * KIB: 15.3, 384 * KIB: 34.6},
        predict=_best_of_island,
        fitted="floor 1.5 us, 0.7 us one way",
    ),
    Row(
        name="copy-engine ring, 4 ranks, PCIe 4.0",
        source="flashinfer#4870",
        points={96 * MIB: 5932.0},
        predict=_on(tree(["s0"] * 4, [0] * 4, link_bytes_s=26e9), "copy"),
    ),
    Row(
        name="copy-engine ring, 4 ranks, PCIe 5.0",
        source="flashinfer#4870",
        points={96 * MIB: 2886.0},
        predict=_on(one_switch(4), "copy"),
    ),
    Row(
        name="all-gather of one 8K row, 2 ranks",
        source="flashinfer#5023",
        points={8 * KIB: 4.1},
        predict=_gather(2),
    ),
    Row(
        name="all-gather of one 8K row, 4 ranks",
        source="flashinfer#5023",
        points={8 * KIB: 5.2},
        predict=_gather(4),
    ),
    Row(
        name="all-gather of 32,768 rows of 8K, 2 ranks",
        source="flashinfer#5023",
        points={32768 * 8 * KIB: 5650.0},
        predict=_gather_large,
    ),
    Row(
        name="host zero-copy one-shot, 2 ranks on one link",
        source="measured, one H200",
        points={4 * KIB: 6.1, 64 * KIB: 10.0, MIB: 87.0, 4 * MIB: 331.0},
        predict=_host_shared,
    ),
    Row(
        name="host copy-engine loop, best of 1 to 16 pieces",
        source="measured, one H200",
        points={MIB: 72.0, 5 * MIB: 208.0, 20 * MIB: 591.0},
        predict=_host_loop,
        fitted="28 us floor with the launches from the host (measured)",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """NCCL between a low and a high estimate. `points`: bytes -> measured microseconds."""

    name: str
    world: int
    busbw: float
    points: dict[int, tuple[float, ...]]


NCCL_ROWS = (
    Bracket(name="NCCL small, 4 ranks", world=4, busbw=41e9, points={KIB: (13.2, 14.1)}),
    Bracket(name="NCCL small, 8 ranks", world=8, busbw=41e9, points={KIB: (17.3, 24.6)}),
    Bracket(
        name="NCCL, 8 ranks, two switches",
        world=8,
        busbw=46e9,
        points={256 * KIB: (25.0,), MIB: (80.0,), 4 * MIB: (182.0,)},
    ),
)

#: NCCL in a graph on two H200 with its peer paths off: bytes -> measured microseconds.
NCCL_NO_PEER = {
    8 * KIB: 15.9,
    64 * KIB: 20.0,
    256 * KIB: 39.6,
    MIB: 66.2,
    4 * MIB: 170.4,
    16 * MIB: 600.4,
    64 * MIB: 2355.0,
}

#: Mean GB/s of the distance-k permutation on two switches of four with one 53 GB/s uplink each.
DISTANCE = {1: 50.0, 2: 38.0, 3: 25.6, 4: 12.6}
DISTANCE_TREE = tree(["s0"] * 4 + ["s1"] * 4, [0] * 8, link_bytes_s=53e9)


def distance_gb_s(distance: int) -> float:
    """Mean rate of a card in the distance-k permutation."""
    size = 1e9
    done = simulate(schedules.probe(DISTANCE_TREE, distance, size), network(DISTANCE_TREE))
    return sum(size / end for end in done.ends) / len(done.ends) / 1e3


__all__ = [
    "DISTANCE",
    "HOST",
    "NCCL_NO_PEER",
    "NCCL_ROWS",
    "ROWS",
    "Bracket",
    "Row",
    "distance_gb_s",
]
