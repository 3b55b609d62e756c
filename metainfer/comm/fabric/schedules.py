"""All-reduce as step lists for the simulator: the same steps that the backends execute.

Every builder gives the transfers of all ranks. S is the message in bytes; waits without a path
stand for kernel floors and handshakes; a handshake belongs to its pair, so ranks across a crossing
wait longer than neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from metainfer.comm.fabric.events import Outcome, Transfer, simulate
from metainfer.comm.fabric.network import HOST, move, network
from metainfer.comm.model import SEEDS, Costs
from metainfer.comm.topology import Topology

Ends = dict[int, tuple[int, ...]]
"""Per rank, the transfers that it has to have seen before its next step."""


class Schedule:
    """Transfers being listed; indices are those that `after` refers to."""

    def __init__(self, topology: Topology, costs: Costs) -> None:
        self.topology, self.costs = topology, costs
        self.items: list[Transfer] = []

    def add(self, item: Transfer) -> int:
        self.items.append(item)
        return len(self.items) - 1

    def begin(self, us: float) -> Ends:
        """Every rank's kernel floor."""
        return {r: (self.add(Transfer(delay_us=us)),) for r in range(self.topology.world)}

    def flag(self, source: int, target: int) -> float:
        """A handshake of this pair: the drain, a way there and a way back."""
        return self.costs.poll + 2 * self.topology.latency_us(source, target)

    def exchange(self, size: float, ready: Ends, groups: tuple[tuple[int, ...], ...]) -> Ends:
        """Everyone of a group writes `size` to everyone else of it, then a handshake per pair."""
        done: dict[int, list[int]] = {rank: list(ready[rank]) for rank in ready}
        for group in groups:
            for source in group:
                for target in group:
                    if source == target:
                        continue
                    latency = self.flag(source, target)
                    after = ready[source]
                    item = move(
                        self.topology, source, target, size, after=after, latency_us=latency
                    )
                    done[target].append(self.add(item))
        return {rank: tuple(items) for rank, items in done.items()}

    def rotate(self, size: float, ready: Ends, share: float, setup: float, flag: float) -> Ends:
        """N - 1 passes; in pass p rank r writes `size` to r + 1 + p. A pass begins when the last
        one has left and arrived here. `flag`: share of a handshake."""
        n = self.topology.world
        for step in range(1, n):
            done = dict(ready)
            for source in range(n):
                target = (source + step) % n
                item = move(
                    self.topology,
                    source,
                    target,
                    size,
                    after=ready[source],
                    delay_us=setup,
                    latency_us=flag * self.flag(source, target),
                    share=share,
                )
                index = self.add(item)
                done[target] = (*done[target], index)
                done[source] = (*done[source], index)
            ready = done
        return ready


def one_shot(topology: Topology, size: int, costs: Costs = SEEDS) -> list[Transfer]:
    plan = Schedule(topology, costs)
    plan.exchange(size, plan.begin(costs.floor), _all(topology))
    return plan.items


def ll(topology: Topology, size: int, costs: Costs = SEEDS) -> list[Transfer]:
    """Data carries its own flags: twice the bytes, one way instead of a handshake."""
    items = one_shot(topology, 2 * size, costs)
    return [_without_flag(item, costs) for item in items]


def two_shot(topology: Topology, size: int, costs: Costs = SEEDS) -> list[Transfer]:
    plan, part = Schedule(topology, costs), size / topology.world
    ready = plan.exchange(part, plan.begin(costs.floor), _all(topology))
    plan.exchange(part, ready, _all(topology))
    return plan.items


def staged(topology: Topology, size: int, costs: Costs = SEEDS) -> list[Transfer]:
    plan, part = Schedule(topology, costs), size / topology.world
    ready = plan.begin(costs.floor)
    for _ in range(2):
        ready = plan.rotate(part, ready, costs.staged, 0.0, costs.stage)
    return plan.items


def copy(topology: Topology, size: int, costs: Costs = SEEDS) -> list[Transfer]:
    plan, part = Schedule(topology, costs), size / topology.world
    ready = plan.begin(costs.copy_floor)
    for _ in range(2):
        ready = plan.rotate(part, ready, costs.copy, costs.copy_setup, 0.0)
    return plan.items


def island(topology: Topology, size: int, costs: Costs = SEEDS, wide: int = 2) -> list[Transfer]:
    """Reduce inside each half, exchange `wide` times a shard with the partner across, gather."""
    plan = Schedule(topology, costs)
    inside = topology.islands
    part = size / len(inside[0])
    ready = plan.exchange(part, plan.begin(costs.floor), inside)
    pairs = tuple(zip(*inside, strict=True))
    ready = plan.exchange(wide * part, ready, pairs)
    plan.exchange(part, ready, inside)
    return plan.items


def island_ll(topology: Topology, size: int, costs: Costs = SEEDS, wide: int = 2) -> list[Transfer]:
    return [_without_flag(item, costs) for item in island(topology, 2 * size, costs, wide)]


def host_one_shot(
    topology: Topology, size: int, costs: Costs = SEEDS, cards: tuple[int, ...] | None = None
) -> list[Transfer]:
    """Each rank writes to host memory, then reads the others'. `cards`: the card of each rank, for
    ranks that share one."""
    cards = cards or tuple(range(topology.world))
    plan = Schedule(topology, costs)
    ready = plan.begin(costs.floor)
    share = topology.host_bytes_s / topology.link_bytes_s
    wrote = tuple(
        plan.add(move(topology, card, HOST, size, after=ready[0], share=share)) for card in cards
    )
    seen = plan.add(Transfer(after=wrote, delay_us=costs.host_handshake))
    for card in cards:
        read = (len(cards) - 1) * size
        plan.add(move(topology, HOST, card, read, after=(seen,), share=share))
    return plan.items


def host_copy_loop(
    topology: Topology, size: int, costs: Costs = SEEDS, pieces: int = 4, floor: float = 28.0
) -> list[Transfer]:
    """One card's copy engines down to host memory and up again, in pieces, both ways at once."""
    plan = Schedule(topology, costs)
    begin = plan.add(Transfer(delay_us=floor))
    down, up = begin, begin
    for _ in range(pieces):
        setup = costs.copy_setup
        down = plan.add(move(topology, 0, HOST, size / pieces, after=(down,), delay_us=setup))
        up = plan.add(move(topology, HOST, 0, size / pieces, after=(down, up), delay_us=setup))
    return plan.items


def probe(topology: Topology, distance: int, size: float) -> list[Transfer]:
    """The distance-k permutation: every card writes to the one `distance` further on."""
    n = topology.world
    return [move(topology, i, (i + distance) % n, size) for i in range(n)]


Builder = Callable[[Topology, int, Costs], list[Transfer]]
BUILDERS: Mapping[str, Builder] = {
    "ll": ll,
    "one_shot": one_shot,
    "two_shot": two_shot,
    "staged": staged,
    "island_ll": island_ll,
    "island": island,
    "copy": copy,
}


def run(algorithm: str, topology: Topology, size: int, costs: Costs = SEEDS) -> Outcome:
    """Simulate one all-reduce."""
    return simulate(BUILDERS[algorithm](topology, size, costs), network(topology))


def _all(topology: Topology) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(topology.world)),)


def _without_flag(item: Transfer, costs: Costs) -> Transfer:
    """The same transfer known one way after its last byte: no drain, no way back."""
    if not item.path:
        return item
    return Transfer(
        path=item.path,
        bytes=item.bytes,
        after=item.after,
        delay_us=item.delay_us,
        latency_us=(item.latency_us - costs.poll) / 2,
        share=item.share,
        fan=item.fan,
    )
