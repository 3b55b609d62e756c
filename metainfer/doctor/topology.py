"""What hangs on what, as data: sockets, root ports, switches, GPUs, and the link above each.

Read from lspci where it can be; a machine file gives the GPUs alone. Rows are in drawing order,
each names its parent; `fault` says in words what is wrong with the link above it, "" for nothing.
"""

from __future__ import annotations

from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA, LinkFacts
from metainfer.platform.lspci import ROOT_PORT, UPSTREAM, PciDevice
from metainfer.platform.text_facts import read_tree

HOST = -1
UNKNOWN_LINK = "link unknown"


def topology(inputs: Inputs) -> list[dict[str, object]]:
    """Rows ``{"id", "kind", "name", "parent", "link", "fault"}``, kinds socket, root, switch, gpu.

    Empty where a processor computes: there is nothing between it and its memory to draw.
    """
    facts = inputs.facts
    if facts.device.kind != CUDA:
        return []
    tree = None if inputs.text is None else read_tree(inputs.text)
    rows: dict[str, dict[str, object]] = {}
    links = {link.target: link for link in facts.links if link.source == HOST}
    for index, device in enumerate(facts.devices):
        chain = () if tree is None else tree.chain(device.bus_id or "")
        parent = _socket(rows, device.numa_node)
        for port in reversed(chain):
            parent = _bridge(rows, port, parent)
        pci = None if tree is None else tree.devices.get(device.bus_id or "")
        link, fault = _gpu_link(links.get(index), pci)
        blocked = [port for port in chain if port.redirects and port.port != UPSTREAM]
        if blocked:
            fault = "; ".join(filter(None, (fault, f"ACS at {blocked[0].address[5:]}")))
        _add(rows, f"gpu{index}", "gpu", f"GPU {index}: {device.name}", parent, link, fault)
    return list(rows.values())


def _socket(rows: dict[str, dict[str, object]], node: int | None) -> str:
    name = "host, node unknown" if node is None else f"memory node {node}"
    return _add(rows, f"node{'?' if node is None else node}", "socket", name, "", "", "")


def _bridge(rows: dict[str, dict[str, object]], port: PciDevice, parent: str) -> str:
    """A root port or a switch (by its upstream port); other ports are part of their switch."""
    if port.port == ROOT_PORT or (port.port is None and parent.startswith("node")):
        return _add(rows, port.address, "root", f"root port {port.address}", parent, "", "")
    if port.port != UPSTREAM:
        return parent
    link, fault = _link(port.speed, port.width, port.max_width)
    return _add(rows, port.address, "switch", f"switch {port.address}", parent, link, fault)


def _gpu_link(link: LinkFacts | None, pci: PciDevice | None) -> tuple[str, str]:
    if link is not None and link.width is not None:
        return _link(link.generation, link.width, link.max_width)
    if pci is not None and pci.width is not None:
        return _link(pci.speed, pci.width, pci.max_width)
    if link is not None and link.max_width is not None:
        most = f"at most Gen{link.max_generation or '?'} x{link.max_width}"
        return f"{most}, now unknown", ""
    return UNKNOWN_LINK, ""


def _link(generation: int | None, width: int | None, most: int | None) -> tuple[str, str]:
    if width is None:
        return UNKNOWN_LINK, ""
    text = f"Gen{generation or '?'} x{width}"
    return text, f"x{width} of x{most}" if most is not None and width < most else ""


def _add(
    rows: dict[str, dict[str, object]],
    row_id: str,
    kind: str,
    name: str,
    parent: str,
    link: str,
    fault: str,
) -> str:
    rows.setdefault(
        row_id,
        {"id": row_id, "kind": kind, "name": name, "parent": parent, "link": link, "fault": fault},
    )
    return row_id
