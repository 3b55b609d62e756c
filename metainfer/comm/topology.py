"""The PCIe tree that messages cross, from a machine's facts; what is not known is assumed by name.

Rates in bytes per second and direction, latencies in microseconds. A tree here is: cards on
switches or root ports, those on sockets, sockets on one crossing, and host memory. The
seeds are field figures for PCIe 5.0; `assumed` says which of them stand in for a fact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from metainfer.core.errors import UserError
from metainfer.platform.facts import CPU, Facts, LinkFacts

LINK_BYTES_S = 54e9  # PCIe 5.0 x16, seed
DUPLEX_SHARE = 93 / 54  # both directions of one link at once, over one direction: measured on H200
DRAM_BYTES_S = 93.5e9  # all devices on host memory at once: middle of 73 and 114, seed
CROSSING_BYTES_S = 90e9  # between two sockets' root ports, seed
HALF_DUPLEX_OF = {3: 12e9, 4: 26e9, 5: LINK_BYTES_S}  # by generation at x16, seeds
KERNEL_SHARE = 51 / 55  # kernels, both directions together, over one: on H200, before ADR 0049
COPY_US = 90.0  # of a collective by copy engines through host memory beside its bytes: likewise
SAME_SWITCH_US, ROOT_US = 0.7, 1.1  # one-way posted write with its poll: field


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`switches[i]`: the switch of card i, "" for a root port; `sockets[i]`: its socket. `peer`:
    whether cards may write into each other, None where that is unknown. `uplink_bytes_s`: a switch
    to its socket; `crossing_bytes_s`: one socket to another, all flows together. `duplex_bytes_s`,
    `kernel_bytes_s`: a link's both directions together, by copy engines and by kernels on pinned
    memory; `copy_us`: what a collective by copy engines takes there beside its bytes (None: by the
    seeds of `model.Costs`). `collapse`: what is left of posted writes that fan out from one switch
    to several sockets (1: nothing lost).
    """

    switches: tuple[str, ...]
    sockets: tuple[int, ...]
    link_bytes_s: float
    host_bytes_s: float
    duplex_bytes_s: float
    dram_bytes_s: float
    uplink_bytes_s: float
    crossing_bytes_s: float
    peer: bool | None = None
    kernel_bytes_s: float | None = None
    copy_us: float | None = None
    switch_us: float = SAME_SWITCH_US
    root_us: float = ROOT_US
    collapse: float = 1.0
    assumed: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        return len(self.switches)

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Cards by socket, each group ascending: what the crossing separates."""
        order = sorted(set(self.sockets))
        return tuple(
            tuple(i for i, socket in enumerate(self.sockets) if socket == each) for each in order
        )

    def latency_us(self, source: int, target: int) -> float:
        """One way, a posted write with its flag seen."""
        same = self.switches[source] and self.switches[source] == self.switches[target]
        return self.switch_us if same else self.root_us

    def first(self, ranks: int) -> Topology:
        """The tree as the first `ranks` cards see it."""
        return dataclasses.replace(
            self, switches=self.switches[:ranks], sockets=self.sockets[:ranks]
        )

    def group(self, ranks: int, of: int) -> Topology:
        """One of the groups of `ranks` ranks that `of` ranks form: all talk at once, so each has
        its part of what they share."""
        return dataclasses.replace(
            self.first(ranks),
            dram_bytes_s=self.dram_bytes_s * ranks / of,
            crossing_bytes_s=self.crossing_bytes_s * ranks / of,
        )


def tree(
    switches: Sequence[str],
    sockets: Sequence[int],
    *,
    link_bytes_s: float = LINK_BYTES_S,
    crossing_bytes_s: float = CROSSING_BYTES_S,
    uplink_bytes_s: float | None = None,
    dram_bytes_s: float = DRAM_BYTES_S,
    peer: bool | None = True,
    collapse: float = 1.0,
    assumed: tuple[str, ...] = (),
) -> Topology:
    """A tree with seeds for what is left out; `uplink_bytes_s` is as wide as a card's link."""
    return Topology(
        switches=tuple(switches),
        sockets=tuple(sockets),
        link_bytes_s=link_bytes_s,
        host_bytes_s=link_bytes_s * 52 / 54,  # kernels on pinned memory reach 52 of 54: measured
        duplex_bytes_s=link_bytes_s * DUPLEX_SHARE,
        dram_bytes_s=dram_bytes_s,
        uplink_bytes_s=link_bytes_s if uplink_bytes_s is None else uplink_bytes_s,
        crossing_bytes_s=crossing_bytes_s,
        peer=peer,
        collapse=collapse,
        assumed=assumed,
    )


def one_switch(world: int) -> Topology:
    """All cards under one switch: no traffic between them leaves it."""
    return tree(["s0"] * world, [0] * world)


def root_ports(world: int, sockets: int = 1) -> Topology:
    """Every card on a root port of its own, spread evenly in order over `sockets`."""
    return tree([""] * world, [i * sockets // world for i in range(world)])


def two_switches(world: int, crossing_bytes_s: float = 40e9) -> Topology:
    """Half the cards under a switch of one socket, half under one of another."""
    half = world // 2
    where = [0] * half + [1] * (world - half)
    return tree([f"s{i}" for i in where], where, crossing_bytes_s=crossing_bytes_s)


def no_peer(world: int, dram_bytes_s: float = DRAM_BYTES_S) -> Topology:
    """Root ports of one socket, and no card may write into another."""
    plain = tree([""] * world, [0] * world, dram_bytes_s=dram_bytes_s, peer=False)
    return dataclasses.replace(plain)


def from_facts(facts: Facts) -> Topology:
    """The tree of a machine; each guess is named in `assumed`.

    Raises:
        UserError: it has no device on a bus.
    """
    devices = facts.devices
    if not devices or facts.device.kind == CPU:
        raise UserError(
            "this machine has no devices that a bus could link.",
            "Name a machine with cards: --machine NAME.",
            code="no_bus",
        )
    assumed: list[str] = []
    host = [link for link in facts.links if link.source == -1]
    rate = min((link.bytes_s for link in host if link.bytes_s is not None), default=None)
    if rate is None:
        generation = min((x.max_generation for x in host if x.max_generation), default=5)
        rate = HALF_DUPLEX_OF.get(generation, LINK_BYTES_S)
        assumed.append(f"link rate {rate / 1e9:.0f} GB/s, a seed for generation {generation}")
    if any(device.switch is None for device in devices):
        assumed.append("each card on a root port of its own")
    nodes = [device.numa_node for device in devices]
    if any(node is None for node in nodes):
        assumed.append("one socket")
        nodes = [0] * len(devices)
    dram = facts.host.dma_bytes_s
    if dram is None:
        dram = DRAM_BYTES_S
        assumed.append(f"host memory {dram / 1e9:.1f} GB/s for all cards, a seed")
    found = tree(
        [device.switch or "" for device in devices],
        [node or 0 for node in nodes],
        link_bytes_s=rate,
        dram_bytes_s=dram,
        peer=_peer(facts, assumed),
        assumed=tuple(assumed),
    )
    both, kernels, start = (
        [value for link in host if (value := getattr(link, name)) is not None]
        for name in ("duplex_bytes_s", "kernel_bytes_s", "copy_us")
    )
    return dataclasses.replace(
        found,
        duplex_bytes_s=min(both, default=found.duplex_bytes_s),
        kernel_bytes_s=min(kernels, default=rate * KERNEL_SHARE),
        copy_us=max(start, default=COPY_US),
    )


def _peer(facts: Facts, assumed: list[str]) -> bool | None:
    pairs: list[LinkFacts] = [link for link in facts.links if link.source >= 0]
    said = [link.peer_write for link in pairs]
    if len(facts.devices) == 1:
        return False
    if not said or None in said:
        if False in said:
            return False
        assumed.append("peer access is unknown, so it is not used")
        return None
    return all(said)
