"""PCIe links, peer access, memory windows and address translation of GPUs."""

from __future__ import annotations

from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA, DeviceFacts, LinkFacts

HOST = -1
SMALL_WINDOW = 256 << 20


def check(inputs: Inputs) -> list[Finding]:
    facts = inputs.facts
    if facts.device.kind != CUDA:
        return []
    found: list[Finding] = []
    host_links = {link.target: link for link in facts.links if link.source == HOST}
    for index, device in enumerate(facts.devices):
        found += _host_link(index, device, host_links.get(index))
        found += _window(index, device, len(facts.devices))
    if len(facts.devices) > 1:
        found += [*_peers(inputs), *_translation(inputs)]
    return found


def where(index: int, device: DeviceFacts) -> str:
    return f"GPU {index} ({device.bus_id or 'bus id unknown'}, {device.name})"


def _host_link(index: int, device: DeviceFacts, link: LinkFacts | None) -> list[Finding]:
    place = where(index, device)
    if link is None or link.width is None:
        what = "the width of its PCIe link (not readable, or inside a virtual machine)"
        return [unknown("link.width", place, what)]
    found = []
    if link.max_width is not None and link.width < link.max_width:
        what = f"its PCIe link runs x{link.width} of x{link.max_width}."
        remedy = "Reseat the card; check riser, slot wiring and the board's lane sharing."
        found.append(slows("link.width", place, what, remedy))
    now, most = link.generation, link.max_generation
    if now is None or most is None:
        found.append(unknown("link.generation", place, "the generation of its PCIe link"))
    elif now < most:
        what = f"its PCIe link is at generation {now} of {most}; idle cards train down."
        remedy = "Look again under load; if it stays, check riser and firmware settings."
        found.append(information("link.generation", place, what, remedy))
    return found


def _window(index: int, device: DeviceFacts, devices: int) -> list[Finding]:
    window, memory = device.bar_bytes, device.memory_bytes
    if window is None:
        return [unknown("link.window", where(index, device), "the size of its memory window")]
    if memory is None or window > SMALL_WINDOW or window >= memory:
        return []
    what = f"its memory window is {window >> 20} MiB: peers cannot reach most of its memory."
    remedy = "Enable resizable BAR and above-4G decoding in the firmware."
    make = slows if devices > 1 else information
    return [make("link.window", where(index, device), what, remedy)]


def _peers(inputs: Inputs) -> list[Finding]:
    facts, found = inputs.facts, []
    count = len(facts.devices)
    links = {(link.source, link.target): link for link in facts.links}
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    for kind, word in (("peer_read", "read"), ("peer_write", "write")):
        states = {pair: getattr(links.get(pair), kind, None) for pair in pairs}
        refused = [pair for pair in pairs if states[pair] is False]
        unread = [pair for pair in pairs if states[pair] is None]
        if refused:
            what = f"the driver refuses peer {word} on {_listed(refused, len(pairs))}."
            remedy = "Transfers go through host memory; see the card's support for peer access."
            found.append(slows(f"link.{kind.replace('_', '-')}", _places(refused), what, remedy))
        if unread:
            what = f"peer {word} on {_listed(unread, len(pairs))}"
            found.append(unknown(f"link.{kind.replace('_', '-')}", _places(unread), what))
    if not found:
        what = "the driver allows peer access on every pair; only a data test proves it."
        found.append(information("link.peer-claimed", "all pairs", what))
    return found


def _translation(inputs: Inputs) -> list[Finding]:
    mode = inputs.facts.host.iommu
    if mode is None:
        what = "whether the IOMMU translates peer traffic (not readable here)"
        return [unknown("link.iommu", "IOMMU", what)]
    if mode != "translated":
        return []
    what = "the IOMMU translates device addresses: peer traffic is slow and can arrive corrupted."
    remedy = (
        "Boot with iommu=pt, or disable the IOMMU in the firmware if no virtual machine needs it."
    )
    return [slows("link.iommu", "IOMMU", what, remedy)]


def _listed(pairs: list[tuple[int, int]], total: int) -> str:
    return f"{len(pairs)} of {total} directed pairs"


def _places(pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{i}->{j}" for i, j in pairs[:8])
    return f"GPUs {shown}" + (", ..." if len(pairs) > 8 else "")
