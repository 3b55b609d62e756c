"""Contradictions inside a described device or link. Pure; an unknown value contradicts nothing."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.platform.capability import instructions
from metainfer.platform.facts import CPU, CUDA, DeviceFacts, LinkFacts

#: Bytes per second of one lane in one direction, by generation: transfers times coding (PCI
#: Express base specification: 8b/10b, then 128b/130b, then 236 payload bytes of a 256-byte flit).
LANE_BYTES_S = {
    1: 2.5e9 * 0.8 / 8,
    2: 5e9 * 0.8 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 236 / 256 / 8,
}
WIDTHS = (1, 2, 4, 8, 12, 16, 32)
_BUILT_IN = (CPU, CUDA)
Complaint = tuple[str, str]


def device_complaints(
    device: DeviceFacts, platform: object, numa_nodes: int | None
) -> Iterator[Complaint]:
    """(field, what is wrong) for each contradiction."""
    if device.kind in _BUILT_IN and platform in _BUILT_IN and device.kind != platform:
        yield "kind", f"kind is {device.kind}, the machine's platform is {platform}"
    if device.kind == CPU and device.capability is not None:
        yield "capability", "a processor has no CUDA capability"
    yield from _instruction_complaints(device)
    most = device.power_max_w
    for name in ("power_cap_w", "power_default_w"):
        watts = getattr(device, name)
        if watts is not None and most is not None and watts > most:
            yield name, f"{name} is {watts:g} W, above the card's maximum of {most:g} W"
    node = device.numa_node
    if node is not None and numa_nodes is not None and node >= numa_nodes:
        yield "numa_node", f"numa_node is {node}, the host has {numa_nodes}, from 0"


def _instruction_complaints(device: DeviceFacts) -> Iterator[Complaint]:
    if device.kind != CUDA or device.capability is None:
        return
    rules = instructions(device.capability)
    if rules is None:
        return
    major, minor = device.capability
    for name in ("dot_types", "storage_types", "features"):
        extra = (getattr(device, name) or frozenset()) - getattr(rules, name)
        if extra:
            listed = ", ".join(sorted(extra))
            yield name, f"{name} lists {listed}, which capability {major}.{minor} does not have"


def link_complaints(link: LinkFacts) -> Iterator[Complaint]:
    """(field, what is wrong) for each contradiction."""
    for now, most in (("generation", "max_generation"), ("width", "max_width")):
        have, limit = getattr(link, now), getattr(link, most)
        if have is not None and limit is not None and have > limit:
            yield now, f"{now} is {have}, above {most} {limit}"
    if link.kind not in (None, "pcie"):
        return
    for name in ("generation", "max_generation"):
        value = getattr(link, name)
        if value is not None and value not in LANE_BYTES_S:
            yield name, f"{name} is {value}; known: {', '.join(map(str, LANE_BYTES_S))}"
    for name in ("width", "max_width"):
        value = getattr(link, name)
        if value is not None and value not in WIDTHS:
            yield name, f"{name} is {value}; possible: {', '.join(map(str, WIDTHS))}"
    # A link that idles trains down, so the rate is judged by the best that both ends could do.
    generation = link.max_generation or link.generation
    width = link.max_width or link.width
    lane = LANE_BYTES_S.get(generation or 0)
    if link.bytes_s is not None and lane is not None and width is not None:
        limit = lane * width
        if link.bytes_s > limit:
            what = f"generation {generation} x{width} carries at most {limit / 1e9:.1f} GB/s"
            yield "bytes_s", f"bytes_s is {link.bytes_s / 1e9:.1f} GB/s, {what}"
