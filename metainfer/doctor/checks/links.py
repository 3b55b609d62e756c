"""Width and generation of PCIe links, against what both ends could do."""

from __future__ import annotations

from metainfer.doctor.evidence import fact, pci_of, smi_of, where
from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA, LinkFacts
from metainfer.platform.lspci import UPSTREAM, PciDevice
from metainfer.platform.text_facts import (
    GENERATION_CARD,
    GENERATION_NOW,
    WIDTH_NOW,
    read_tree,
)

HOST = -1
RESEAT = "Reseat the card; check riser, slot wiring and the board's lane sharing."
RESEAT_RISK = "the machine is down meanwhile"


def check(inputs: Inputs) -> list[Finding]:
    facts = inputs.facts
    if facts.device.kind != CUDA:
        return []
    host_links = {link.target: link for link in facts.links if link.source == HOST}
    found: list[Finding] = []
    for index in range(len(facts.devices)):
        found += _host_link(inputs, index, host_links.get(index))
    return [*found, *_uplinks(inputs)]


def _host_link(inputs: Inputs, index: int, link: LinkFacts | None) -> list[Finding]:
    place = where(index, inputs.facts.devices[index])
    if link is None or link.width is None:
        what = "the width of its PCIe link (not readable, or inside a virtual machine)"
        return [unknown("link.width", place, what, evidence=_line(inputs, index, WIDTH_NOW))]
    found = []
    if link.max_width is not None and link.width < link.max_width:
        what = f"its PCIe link runs x{link.width} of x{link.max_width}."
        proof = _line(inputs, index, WIDTH_NOW)
        found.append(slows("link.width", place, what, RESEAT, proof, RESEAT_RISK))
    now, most = link.generation, link.max_generation
    proof = _line(inputs, index, GENERATION_NOW)
    if now is None or most is None:
        what = "the generation of its PCIe link"
        found.append(unknown("link.generation", place, what, evidence=proof))
    elif now < most:
        what = f"its PCIe link is at generation {now} of {most}; idle cards train down."
        remedy = "Look again under load; if it stays, check riser and firmware settings."
        found.append(information("link.generation", place, what, remedy, proof))
    return [*found, *_slot(inputs, index, most)]


def _slot(inputs: Inputs, index: int, most: int | None) -> list[Finding]:
    """The slot is slower than the card."""
    device = inputs.facts.devices[index]
    gpu = smi_of(inputs, device.bus_id)
    card = None if gpu is None else gpu.number(*GENERATION_CARD)
    if gpu is None or card is None or most is None or card <= most:
        return []
    what = (
        f"its slot allows generation {most}, the card could do {card:.0f}: half the link's speed."
    )
    remedy = "Move the card to a faster slot, or raise the slot's link speed in the firmware."
    proof = f"nvidia-smi -q: {gpu.line(*GENERATION_CARD)}"
    return [slows("link.slot", where(index, device), what, remedy, proof, RESEAT_RISK)]


def _uplinks(inputs: Inputs) -> list[Finding]:
    """Switches whose own link to the host is narrower or slower than it could be."""
    tree = None if inputs.text is None else read_tree(inputs.text)
    if tree is None:
        return []
    ports: dict[str, PciDevice] = {}
    for device in inputs.facts.devices:
        for port in tree.chain(device.bus_id or ""):
            if port.port == UPSTREAM:
                ports[port.address] = port
    found = []
    for address, port in ports.items():
        if not port.width or not port.max_width or port.width >= port.max_width:
            continue
        what = (
            f"the switch's own link to the host runs x{port.width} of x{port.max_width}; "
            "every GPU below shares it."
        )
        proof = f"lspci: {address} {port.lines['LnkSta']}"
        remedy = "Check the switch's cable, slot wiring and the board's lane sharing."
        found.append(slows("link.uplink", f"switch {address}", what, remedy, proof, RESEAT_RISK))
    return found


def _line(inputs: Inputs, index: int, path: str) -> str:
    bus_id = inputs.facts.devices[index].bus_id
    pci, gpu = pci_of(inputs, bus_id), smi_of(inputs, bus_id)
    if pci is not None and "LnkSta" in pci.lines:
        return f"lspci: {bus_id} {pci.lines['LnkSta']}"
    if gpu is not None and gpu.line(path):
        return f"nvidia-smi -q: {path}: {gpu.line(path)}"
    for number, link in enumerate(inputs.facts.links):
        if (link.source, link.target) == (HOST, index):
            name = "width" if path == WIDTH_NOW else "generation"
            return fact(inputs.facts, f"links.{number}.{name}")
    return "no link to the host is listed"
