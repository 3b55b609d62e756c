"""Access control (ACS) on the ports between GPUs: redirected peer traffic goes up to the root.

On a switch's downstream port it halves what peers below that switch reach, and hangs were seen; on
a root port it touches only traffic that leaves through that port.
"""

from __future__ import annotations

from collections.abc import Iterable

from metainfer.doctor.evidence import where
from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA
from metainfer.platform.host_text import LSPCI
from metainfer.platform.lspci import DOWNSTREAM, ROOT_PORT, PciDevice
from metainfer.platform.text_facts import read_tree

#: Request redirect, completion redirect, egress control in the ACS control register.
REDIRECT_BITS = 0x2C
RISK = (
    "devices below these ports are no longer isolated from each other: not on a host that hands "
    "devices to virtual machines"
)
READ_AS_ROOT = "Run as root with pciutils installed, outside the container."


def check(inputs: Inputs) -> list[Finding]:
    devices = inputs.facts.devices
    if inputs.facts.device.kind != CUDA or len(devices) < 2:
        return []
    what = "whether access control (ACS) redirects peer traffic"
    tree = None if inputs.text is None else read_tree(inputs.text)
    if tree is None:
        proof = "no host text" if inputs.text is None else inputs.text.why_not(LSPCI)
        return [unknown("link.acs", "PCIe ports", what, READ_AS_ROOT, proof)]
    below: dict[str, set[int]] = {}
    ports: dict[str, PciDevice] = {}
    unseen = []
    for index, device in enumerate(devices):
        chain = tree.chain(device.bus_id or "")
        if not chain:
            unseen.append(where(index, device))
        for port in chain:
            ports[port.address] = port
            below.setdefault(port.address, set()).add(index)
    found = []
    if unseen:
        proof = "lspci shows no bridge above it (virtual machine, or a root complex device)"
        found.append(unknown("link.acs", _some(unseen), what, READ_AS_ROOT, proof))
    denied = [port for port in ports.values() if port.denied and port.acs is None]
    if denied:
        places = _some(f"port {port.address}" for port in denied)
        proof = f"lspci: {denied[0].address} {denied[0].lines['denied']}"
        found.append(unknown("link.acs", places, what, READ_AS_ROOT, proof))
    for address, port in ports.items():
        if port.redirects:
            found.append(_redirecting(port, below[address], len(devices)))
    return found


def _redirecting(port: PciDevice, below: set[int], devices: int) -> Finding:
    flags = ", ".join(port.redirects)
    gpus = ", ".join(map(str, sorted(below)))
    proof = f"lspci: {port.address} {port.lines['acs']}"
    remedy = (
        f"As root: setpci -s {port.address} ECAP_ACS+6.w=0:{REDIRECT_BITS:x} (lasts until the next "
        f"boot; to keep it, boot with pci=disable_acs_redir={port.address}), or switch ACS off in "
        "the firmware."
    )
    place = f"{(port.port or 'port').lower()} {port.address}, above GPU {gpus}"
    if port.port == DOWNSTREAM:
        what = (
            f"access control is on ({flags}): traffic between GPUs below this switch goes up to "
            "the root and back, at half the speed or less; hangs were seen."
        )
        return slows("link.acs", place, what, remedy, proof, RISK)
    if port.port == ROOT_PORT and len(below) == devices:
        what = f"access control is on ({flags}); all GPUs are below this port, so peers bypass it."
        return information("link.acs", place, what, remedy, proof, RISK)
    what = (
        f"access control is on ({flags}): traffic to GPUs below other ports is redirected; "
        "between GPUs below this port it is not."
    )
    return slows("link.acs", place, what, remedy, proof, RISK)


def _some(places: Iterable[str]) -> str:
    listed = list(places)
    return listed[0] + (f" and {len(listed) - 1} more like it" if len(listed) > 1 else "")
