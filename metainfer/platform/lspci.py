"""Reads the text of ``lspci -D -vvv``: ports, links, isolation switches, memory windows. Pure.

Without privileges lspci prints ``Capabilities: <access denied>``; links and access control of such
a device are then unknown, which is not the same as absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

ROOT_PORT, UPSTREAM, DOWNSTREAM = "Root Port", "Upstream Port", "Downstream Port"
#: Transfer rate per lane in GT/s -> PCIe generation (PCI Express Base Specification).
GENERATION = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
#: Access-control switches that send peer traffic up to the root complex, or forbid it.
REDIRECTS = ("ReqRedir", "CmpltRedir", "EgressCtrl")

_HEAD = re.compile(r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ([^:]+): (.*)")
_EXPRESS = re.compile(r"Express \(v\d+\) ((?:\w+ )?\w+)")
_LINK = re.compile(r"Lnk(Cap|Sta):\s.*?Speed ([\d.]+)GT/s(?: \([^)]*\))?, Width x(\d+)")
_BUS = re.compile(r"Bus: primary=([0-9a-f]+), secondary=([0-9a-f]+), subordinate=([0-9a-f]+)")
_REGION = re.compile(
    r"Region (\d+): Memory at \S+ \((\d+)-bit, (non-)?prefetchable\).*\[size=(\d+)([KMGT]?)\]"
)
_FLAG = re.compile(r"(\w+)([+-])")
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(slots=True)
class PciDevice:
    """One function. `lines`: the raw line that each value was read from, as evidence."""

    address: str
    kind: str  # "PCI bridge", "3D controller", ...
    name: str
    port: str | None = None  # root, upstream or downstream port; endpoint
    buses: tuple[int, int] | None = None  # secondary and subordinate, of a bridge
    speed: int | None = None  # generation as trained now
    width: int | None = None
    max_speed: int | None = None
    max_width: int | None = None
    acs: dict[str, bool] | None = None  # switches in force; None: no such capability, or denied
    denied: bool = False
    window: int | None = None  # largest prefetchable memory region, in bytes
    numa_node: int | None = None
    lines: dict[str, str] = field(default_factory=dict)

    @property
    def bus(self) -> int:
        return int(self.address.split(":")[1], 16)

    @property
    def domain(self) -> str:
        return self.address.split(":")[0]

    @property
    def redirects(self) -> tuple[str, ...]:
        """Switches in force that take peer traffic off its short way."""
        return tuple(name for name in REDIRECTS if (self.acs or {}).get(name))


@dataclass(frozen=True, slots=True)
class PciTree:
    """All functions by address, and who hangs below whom."""

    devices: dict[str, PciDevice]

    def parent(self, device: PciDevice) -> PciDevice | None:
        """The bridge whose secondary bus holds `device`; None at a root complex or if unseen."""
        for other in self.devices.values():
            if other.buses and other.domain == device.domain and other.buses[0] == device.bus:
                return other
        return None

    def chain(self, address: str) -> tuple[PciDevice, ...]:
        """Bridges above a device, the nearest first, up to the root port."""
        found: list[PciDevice] = []
        current = self.devices.get(address)
        while current is not None:
            current = self.parent(current)
            if current is None or current in found:
                break
            found.append(current)
        return tuple(found)


def parse_lspci(text: str) -> PciTree:
    """Every function of the text. Lines that say nothing known are passed over."""
    devices: dict[str, PciDevice] = {}
    for block in _blocks(text):
        device = _device(block)
        if device is not None:
            devices[device.address] = device
    return PciTree(devices)


def _blocks(text: str) -> Iterator[list[str]]:
    block: list[str] = []
    for line in text.splitlines():
        if line[:1].strip() and block:
            yield block
            block = []
        if line.strip():
            block.append(line)
    if block:
        yield block


def _device(block: list[str]) -> PciDevice | None:
    head = _HEAD.match(block[0])
    if head is None:
        return None
    device = PciDevice(head[1], head[2], head[3])
    for line in block[1:]:
        _read_line(device, line)
    return device


def _read_line(device: PciDevice, line: str) -> None:
    bare = " ".join(line.split())
    if bare.startswith("Capabilities: <access denied>"):
        device.denied = True
        device.lines["denied"] = bare
    elif (found := _EXPRESS.search(line)) is not None:
        device.port = found[1].strip()
        device.lines["port"] = bare
    elif (found := _LINK.search(line)) is not None:
        speed, width = GENERATION.get(found[2]), int(found[3])
        if found[1] == "Cap":
            device.max_speed, device.max_width = speed, width
        else:
            # An empty slot reports width x0.
            device.speed, device.width = speed, width or None
        device.lines[f"Lnk{found[1]}"] = bare
    elif (found := _BUS.search(line)) is not None:
        device.buses = (int(found[2], 16), int(found[3], 16))
    elif (found := _REGION.search(line)) is not None:
        size = int(found[4]) * _SIZES[found[5]]
        if found[3] is None and size > (device.window or 0):
            device.window = size
            device.lines["window"] = bare
    elif bare.startswith("ACSCtl:"):
        device.acs = {name: sign == "+" for name, sign in _FLAG.findall(bare)}
        device.lines["acs"] = bare
    elif bare.startswith("NUMA node:"):
        node = bare.partition(":")[2].strip()
        device.numa_node = int(node) if node.isdigit() else None
