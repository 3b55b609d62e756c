"""What a collective costs: latency and bandwidth terms with contention, in microseconds.

Formulas and constants: alpha-beta with contention as in the table below; every constant is a seed
until the tuner's record replaces it. S: message bytes, N: ranks, B: link rate, eta: all-to-all
efficiency, Bx: rate of the crossing, h: handshake, T0: kernel floor, g: island size.

==================  ===============================================================
one_shot            T0 + h + max((N-1) S / (B eta), g^2 S / Bx)
ll                  T0 + a + twice the bytes of one_shot; no handshake
two_shot            T0 + 2h + max(2 (N-1)/N S / (B eta), g S / Bx)
staged              T0 + 2 (N-1) 0.7 h + max(2 (N-1)/N S / (0.92 B), g S / Bx)
island              T0 + 2h + h_x + 2 (g-1)/g S / (B eta_g) + c S / Bx
copy                12 + 2 (N-1) 6 + 2 (N-1)/N S / (0.95 B), crossing as staged
copy_island         12 + 6 a copy + the slower of the island's terms + the other over the pieces
host one_shot       T0 + h_host + (S + (N-1) S) / Bk, Bk = min(kernels' rate, DRAM / N)
host two_shot       T0 + 2 h_host + max(S, 2 (N-1)/N S) / Bd, Bd = min(B, DRAM / N), both at
                    most the kernels' rate; one rate of both ways, 0.8 duplex where unknown
host copy           36, or as measured, + as two_shot, at most the duplex rate; a gather's and a
                    reduce-scatter's bytes likewise
broadcast           T0 + h + max((N-1) S / B, g S / Bx): all of it leaves one port
host broadcast      T0 + h_host + (S + a slot) / Bd: written once, read while it is written
nccl                bracket: 6.6 + steps or 8.4 + 5.7 steps, with 2 (N-1)/N S / busbw
nccl, no peers      15.5 + steps + 2 w or 29 + 5.7 steps + w, w 1.65 times what copy sends
==================  ===============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from metainfer.comm.topology import DUPLEX_SHARE, Topology

KIB, MIB = 1 << 10, 1 << 20
FAN_IN = 0.46
"""A port that n senders write into at once gives n ** -FAN_IN of its rate: fitted once, to 0.60 for
three senders and 0.41 for seven (field: 0.56 to 0.64 and 0.38 to 0.45)."""

NCCL_HOST_SHARE = 1.65
"""Time of NCCL without peer access over what the links need (a pair of H200, peer paths off)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seeds of the protocol, in microseconds, and shares of the link rate."""

    floor: float = 3.0  # T0: a kernel in a graph, with its local reduction
    poll: float = 1.6  # of a handshake, beside the two ways of its flag
    staged: float = 0.92
    stage: float = 0.7  # of a handshake, per staged pass
    copy: float = 0.95
    copy_setup: float = 6.0
    copy_floor: float = 12.0
    host_handshake: float = 3.0
    host_kernel: float = 0.8  # of the duplex rate, kernels on pinned memory: where unmeasured
    piece: int = 2 * MIB  # of a pipelined copy
    slot: int = MIB  # of a broadcast through host memory, read while the next is written
    ll_limit: int = 64 * KIB


SEEDS = Costs()
Formula = Callable[[Topology, int, Costs], float]


def eta(senders: int) -> float:
    """Share of its rate that a port keeps when `senders` write into it at once."""
    return float(max(1, senders) ** -FAN_IN)


def handshake(topology: Topology, costs: Costs, *, across: bool = True) -> float:
    """The worst pair's, or within islands only."""
    return costs.poll + 2 * one_way(topology, across=across)


def one_way(topology: Topology, *, across: bool = True) -> float:
    """Largest latency between two cards, or between two of one island."""
    groups = [tuple(range(topology.world))] if across else topology.islands
    pairs = [(i, j) for group in groups for i in group for j in group if i != j]
    return max((topology.latency_us(i, j) for i, j in pairs), default=topology.switch_us)


def one_shot(topology: Topology, size: int, costs: Costs = SEEDS) -> float:
    return costs.floor + handshake(topology, costs) + _everyone(topology, size)


def ll(topology: Topology, size: int, costs: Costs = SEEDS) -> float:
    if size > costs.ll_limit:
        return float("inf")
    return costs.floor + one_way(topology) + _everyone(topology, 2 * size)


def two_shot(topology: Topology, size: int, costs: Costs = SEEDS) -> float:
    n = topology.world
    port = 2 * (n - 1) / n * size / (topology.link_bytes_s * eta(n - 1)) * 1e6
    wire = max(port, _crossing(topology, _halves(topology) * size))
    return costs.floor + 2 * handshake(topology, costs) + wire


def staged(topology: Topology, size: int, costs: Costs = SEEDS) -> float:
    n = topology.world
    port = 2 * (n - 1) / n * size / (costs.staged * topology.link_bytes_s) * 1e6
    wire = max(port, _crossing(topology, _halves(topology) * size))
    return costs.floor + 2 * (n - 1) * costs.stage * handshake(topology, costs) + wire


def island(topology: Topology, size: int, costs: Costs = SEEDS, wide: int = 2) -> float:
    """`wide`: bytes on the crossing over those of the message: 2 for float32 partials of bf16."""
    if len(topology.islands) < 2:
        return float("inf")
    h_in, h_x = (handshake(topology, costs, across=across) for across in (False, True))
    return costs.floor + 2 * h_in + h_x + _inside(topology, size) + _crossing(topology, wide * size)


def island_ll(topology: Topology, size: int, costs: Costs = SEEDS, wide: int = 2) -> float:
    if len(topology.islands) < 2 or size > costs.ll_limit:
        return float("inf")
    hops = 2 * one_way(topology, across=False) + one_way(topology)
    return costs.floor + hops + _inside(topology, 2 * size) + _crossing(topology, wide * 2 * size)


def copy(topology: Topology, size: int, costs: Costs = SEEDS) -> float:
    n = topology.world
    port = 2 * (n - 1) / n * size / (costs.copy * topology.link_bytes_s) * 1e6
    wire = max(port, _crossing(topology, _halves(topology) * size))
    return costs.copy_floor + 2 * (n - 1) * costs.copy_setup + wire


def copy_island(topology: Topology, size: int, costs: Costs = SEEDS, wide: int = 2) -> float:
    if len(topology.islands) < 2:
        return float("inf")
    g = _halves(topology)
    inside = 2 * (g - 1) / g * size / (costs.copy * topology.link_bytes_s) * 1e6
    cross = _crossing(topology, wide * size)
    setups = (2 * (g - 1) + 1) * costs.copy_setup
    fill = min(inside, cross) / max(1, size // costs.piece)
    return costs.copy_floor + setups + max(inside, cross) + fill


def host_one_shot(topology: Topology, size: int, costs: Costs = SEEDS) -> float:
    rate = _by_kernels(topology)
    return costs.floor + costs.host_handshake + topology.world * size / rate * 1e6


def host_two_shot(topology: Topology, size: int, costs: Costs = SEEDS) -> float:
    rate = topology.kernel_bytes_s
    share = costs.host_kernel if rate is None else rate / topology.duplex_bytes_s
    wire = _through_host(topology, size, share)
    return costs.floor + 2 * costs.host_handshake + wire


def host_copy(topology: Topology, size: int, costs: Costs = SEEDS) -> float:
    """Copy-engine pieces through host memory."""
    return _copied(topology, costs) + _through_host(topology, size, 1.0)


def copied_gather(topology: Topology, size: int, costs: Costs = SEEDS) -> float:
    """All-gather of `size` bytes by copy engines: a rank's own down, the others' up."""
    n = topology.world
    wire = _both_ways(topology, size / n, (n - 1) / n * size, 1.0)
    return _copied(topology, costs) + wire


def copied_scatter(topology: Topology, size: int, costs: Costs = SEEDS) -> float:
    """Reduce-scatter of `size` bytes by copy engines: the others' parts down, theirs of ours up."""
    n = topology.world
    moved = (n - 1) / n * size
    return _copied(topology, costs) + _both_ways(topology, moved, moved, 1.0)


def host_bytes(algorithm: str, world: int, size: int) -> tuple[float, float]:
    """Bytes that a rank's link carries down to and up from host memory in an all-reduce of `size`.

    Section 2.2 of the communication notes: one-shot sends all of it once and takes that of every
    peer; two-shot (and a ring of copies) sends others' parts and its sum, and takes as much as
    peers send of its part and their sums.
    """
    if algorithm == "one_shot":
        return size, (world - 1) * size
    return size, 2 * (world - 1) / world * size


def host_limit_us(
    algorithm: str, world: int, size: int, one_way: float = 55e9, both: float = 93e9
) -> float:
    """The least time of the link for `host_bytes`, each direction alone and both together.

    `one_way`, `both`: bytes a second; by default of a PCIe 5.0 x16 link as copy engines reach it on
    an H200 (55.2 and 55.0 GB/s, 93 in both directions at once).
    """
    down, up = host_bytes(algorithm, world, size)
    return max(down / one_way, up / one_way, (down + up) / both) * 1e6


def direct(
    topology: Topology,
    size: int,
    costs: Costs = SEEDS,
    *,
    through_host: bool = False,
    parted: bool = False,
) -> float:
    """All-gather, reduce-scatter and all-to-all of `size` bytes in one phase. `parted`: what a rank
    sends differs by peer, as in all but a gather, so it goes down once for each."""
    n = topology.world
    moved = (n - 1) / n * size
    if through_host:
        down = moved if parted else size / n
        wire = (down + moved) / _by_kernels(topology) * 1e6
        return costs.floor + costs.host_handshake + wire
    port = moved / (topology.link_bytes_s * eta(n - 1)) * 1e6
    wire = max(port, _crossing(topology, _halves(topology) * size / 2))
    return costs.floor + handshake(topology, costs) + wire


def broadcast(
    topology: Topology, size: int, costs: Costs = SEEDS, *, through_host: bool = False
) -> float:
    """`size` bytes of one rank to all others: to each by itself, or once for all."""
    n = topology.world
    if through_host:
        rate = _by_kernels(topology)
        return costs.floor + costs.host_handshake + (size + min(size, costs.slot)) / rate * 1e6
    port = (n - 1) * size / topology.link_bytes_s * 1e6
    wire = max(port, _crossing(topology, _halves(topology) * size))
    return costs.floor + handshake(topology, costs) + wire


PEER: Mapping[str, Formula] = {
    "ll": ll,
    "one_shot": one_shot,
    "two_shot": two_shot,
    "staged": staged,
    "island_ll": island_ll,
    "island": island,
    "copy": copy,
    "copy_island": copy_island,
}
HOST_KERNELS: Mapping[str, Formula] = {"one_shot": host_one_shot, "two_shot": host_two_shot}
"""What a graph can hold of sums through host memory."""
HOST: Mapping[str, Formula] = {**HOST_KERNELS, "copy": host_copy}


def nccl_bracket(world: int, size: int, busbw: float = 41e9) -> tuple[float, float]:
    """Low and high estimate of NCCL's all-reduce, the better of its two protocols."""
    steps = 2 * (world - 1)
    wire = 2 * (world - 1) / world * size / busbw * 1e6
    protocols = ((6.6 + 1.0 * steps, 2 * wire), (8.4 + 5.7 * steps, wire))
    low = min(max(latency, time) for latency, time in protocols)
    high = min(latency + time for latency, time in protocols)
    return low, high


def nccl_through_host(topology: Topology, size: int) -> float:
    """The same where cards may not write into each other, so that NCCL goes through host memory;
    fitted to one pair in graphs (`fabric.calibration`), steps as above."""
    steps = 2 * (topology.world - 2)
    link = topology.link_bytes_s * DUPLEX_SHARE / topology.duplex_bytes_s  # beside our own copies
    wire = NCCL_HOST_SHARE * _through_host(topology, size, link)
    return min(15.5 + 1.0 * steps + 2 * wire, 29.0 + 5.7 * steps + wire)


def best(
    formulas: Mapping[str, Formula], topology: Topology, size: int, costs: Costs = SEEDS
) -> tuple[str, float]:
    """The cheapest algorithm and its time; ties go to the one named first."""
    times = {name: formula(topology, size, costs) for name, formula in formulas.items()}
    name = min(times, key=lambda each: times[each])
    return name, times[name]


def bands(
    formulas: Mapping[str, Formula], topology: Topology, sizes: list[int], costs: Costs = SEEDS
) -> list[tuple[str, int]]:
    """The crossover table: each algorithm with the largest of `sizes` at which it is still best."""
    names = [best(formulas, topology, size, costs)[0] for size in sizes]
    ends = [i for i, (a, b) in enumerate(pairwise(names)) if a != b]
    return [(names[i], sizes[i]) for i in (*ends, len(sizes) - 1)]


def _everyone(topology: Topology, size: int) -> float:
    """Every rank writes `size` to every other."""
    n = topology.world
    port = (n - 1) * size / (topology.link_bytes_s * eta(n - 1)) * 1e6
    return max(port, _crossing(topology, _halves(topology) ** 2 * size))


def _halves(topology: Topology) -> int:
    return max(len(group) for group in topology.islands)


def _crossing(topology: Topology, size: float) -> float:
    """Time of the crossing for `size` bytes each way; 0 without one."""
    if len(topology.islands) < 2:
        return 0.0
    rate = topology.crossing_bytes_s
    if all(topology.switches):
        rate = min(rate, topology.uplink_bytes_s)
    return size / rate * 1e6


def _inside(topology: Topology, size: int) -> float:
    g = _halves(topology)
    return 2 * (g - 1) / g * size / (topology.link_bytes_s * eta(g - 1)) * 1e6


def _copied(topology: Topology, costs: Costs) -> float:
    """Of a call by copy engines beside its bytes; four pieces each way where it is unknown."""
    seed = costs.copy_floor + 4 * costs.copy_setup
    return seed if topology.copy_us is None else topology.copy_us


def _by_kernels(topology: Topology) -> float:
    """Bytes a second of both directions together; one after the other where it is unknown."""
    rate = topology.kernel_bytes_s or topology.host_bytes_s
    return min(rate, topology.dram_bytes_s / topology.world)


def _through_host(topology: Topology, size: int, share: float) -> float:
    """A rank leaves its own part out: S down, 2 (N-1)/N S up."""
    n = topology.world
    return _both_ways(topology, size, 2 * (n - 1) / n * size, share)


def _both_ways(topology: Topology, down: float, up: float, share: float) -> float:
    """Both directions of a link at once, `share` of the duplex rate at most."""
    rate = min(topology.host_bytes_s, topology.dram_bytes_s / topology.world)
    return max(down / rate, up / rate, (down + up) / (share * topology.duplex_bytes_s)) * 1e6
