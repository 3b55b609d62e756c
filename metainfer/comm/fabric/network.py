"""A PCIe tree as resources of the simulator, and the path of a transfer through it.

Each card has a port with two directions and, for host traffic, one rate for both together; switches
have an uplink with two directions; two sockets meet on a crossing per ordered pair; host memory is
one resource. HOST stands for host memory as an end.
"""

from __future__ import annotations

from metainfer.comm.fabric.events import Network, Transfer
from metainfer.comm.model import FAN_IN
from metainfer.comm.topology import Topology

HOST = -1


def network(topology: Topology, fan_in: float = FAN_IN) -> Network:
    """Resources with their rates in bytes per microsecond."""
    rates: dict[str, float] = {"dram": topology.dram_bytes_s / 1e6}
    fan: dict[str, float] = {}
    for card in range(topology.world):
        rates[f"out{card}"] = rates[f"in{card}"] = topology.link_bytes_s / 1e6
        rates[f"both{card}"] = topology.duplex_bytes_s / 1e6
        fan[f"in{card}"] = fan_in
    for switch in {name for name in topology.switches if name}:
        rates[f"up:{switch}"] = rates[f"down:{switch}"] = topology.uplink_bytes_s / 1e6
    sockets = sorted(set(topology.sockets))
    for a in sockets:
        for b in sockets:
            if a != b:
                rates[f"cross{a}{b}"] = topology.crossing_bytes_s / 1e6
    return Network(rates=rates, fan_in=fan, collapse=topology.collapse)


def move(
    topology: Topology,
    source: int,
    target: int,
    size: float,
    *,
    after: tuple[int, ...] = (),
    delay_us: float = 0.0,
    latency_us: float = 0.0,
    share: float = 1.0,
    write: bool = True,
) -> Transfer:
    """A transfer from card to card, or to or from HOST. Latency is only what is given: schedules
    say whether a flag follows."""
    fan = None
    if source != HOST and target != HOST and write and topology.switches[source]:
        fan = (topology.switches[source], topology.sockets[target])
    return Transfer(
        path=path(topology, source, target),
        bytes=size,
        after=after,
        delay_us=delay_us,
        latency_us=latency_us,
        share=share,
        fan=fan,
    )


def path(topology: Topology, source: int, target: int) -> tuple[str, ...]:
    """Resources between two ends, in order."""
    if source == target:
        raise ValueError(f"a transfer from {source} to itself crosses nothing")
    names: list[str] = []
    leaves = source == HOST or target == HOST
    if source != HOST:
        names.append(f"out{source}")
        if leaves:
            names.append(f"both{source}")
    if not leaves:
        a, b = topology.switches[source], topology.switches[target]
        sockets = topology.sockets[source], topology.sockets[target]
        if not (a and a == b):
            names += [f"up:{a}"] if a else []
            names += [f"cross{sockets[0]}{sockets[1]}"] if sockets[0] != sockets[1] else []
            names += [f"down:{b}"] if b else []
    else:
        card = target if source == HOST else source
        switch = topology.switches[card]
        way = "down" if source == HOST else "up"
        link = [f"{way}:{switch}"] if switch else []
        names += ["dram", *link] if source == HOST else [*link, "dram"]
    if target != HOST:
        if leaves:
            names.append(f"both{target}")
        names.append(f"in{target}")
    return tuple(names)
