"""Facts of a machine from its host text alone: what NVIDIA's tools, lspci and /sys printed there.

The same `Facts` as a live probe gives, with origins that name the text. Nothing is asked of this
computer: a text without GPUs describes a machine whose processor computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache

from metainfer.platform import host_text
from metainfer.platform.capability import instructions
from metainfer.platform.facts import CPU, CUDA, DeviceFacts, Facts, LinkFacts
from metainfer.platform.host_text import HostText
from metainfer.platform.lspci import PciTree, parse_lspci
from metainfer.platform.nvidia_smi import (
    SmiGpu,
    SmiReport,
    parse_capabilities,
    parse_matrix,
    parse_query,
)
from metainfer.platform.origins import DERIVED, PROBED, Origins
from metainfer.platform.probe_host import HostProbe, probe_host
from metainfer.platform.text_root import TextRoot

HOST = -1
#: Paths in the query's report; older drivers use the later spellings.
POWER_CAP = (
    "GPU Power Readings/Current Power Limit",
    "GPU Power Readings/Enforced Power Limit",
    "Power Readings/Enforced Power Limit",
)
POWER_DEFAULT = ("GPU Power Readings/Default Power Limit", "Power Readings/Default Power Limit")
POWER_MAX = ("GPU Power Readings/Max Power Limit", "Power Readings/Max Power Limit")
LINK = "PCI/GPU Link Info"
GENERATION_NOW = f"{LINK}/PCIe Generation/Current"
GENERATION_MOST = f"{LINK}/PCIe Generation/Max"
GENERATION_CARD = (f"{LINK}/PCIe Generation/Device Max",)
WIDTH_NOW, WIDTH_MOST = f"{LINK}/Link Width/Current", f"{LINK}/Link Width/Max"
MEMORY_TOTAL = ("FB Memory Usage/Total",)
MEMORY_USED = ("FB Memory Usage/Used",)
WINDOW = ("BAR1 Memory Usage/Total",)
ECC = ("ECC Mode/Current",)


# Many checks ask the same text; what they get is read, never changed.
_tree = lru_cache(maxsize=8)(parse_lspci)
_query = lru_cache(maxsize=8)(parse_query)


def read_tree(text: HostText) -> PciTree | None:
    """The PCI tree of the text, None when lspci was not read. Shared: not to be changed."""
    listed = text.get(host_text.LSPCI)
    return None if listed is None else _tree(listed)


def read_query(text: HostText) -> SmiReport | None:
    """The query's report of the text, None when it was not read. Shared: not to be changed."""
    listed = text.get(host_text.SMI_QUERY)
    return None if listed is None else _query(listed)


def host_of(text: HostText) -> HostProbe:
    """The host's part, by the same probe that reads a live machine."""
    line = text.line(host_text.COMPILER)
    root = TextRoot(text.texts)
    probe = probe_host(root, lambda: None if line is None else f"cc: {line}")
    # The probe runs here: what it takes from this computer is not the text's.
    return dataclasses.replace(probe, facts=dataclasses.replace(probe.facts, architecture=None))


def facts_of(text: HostText, host: HostProbe) -> Facts:
    """The machine of the text. Pure."""
    query, tree = read_query(text), read_tree(text)
    origins = Origins()
    origins.merge(host.origins)
    software: dict[str, str | None] = {
        name: version or None for name, version in text.pairs(host_text.SOFTWARE).items()
    }
    origins.note("software", PROBED, "software of the host text")
    if query is None or not query.gpus:
        device = DeviceFacts(
            kind=CPU,
            name=host.facts.processor or "processor",
            units=host.facts.usable_cores,
            memory_bytes=host.facts.memory_bytes,
            features=host.cpu_features,
        )
        origins.note("devices", PROBED, "host text")
        return Facts(
            platform=CPU,
            devices=(device,),
            host=host.facts,
            software=software,
            origins=origins.freeze(),
        )
    capabilities = parse_capabilities(text.get(host_text.SMI_CAPABILITY) or "")
    devices = tuple(_device(gpu, text, tree, capabilities) for gpu in query.gpus)
    for index in range(len(devices)):
        _origins(origins, index)
    software["nvidia_driver"] = query.driver
    software["cuda_driver"] = query.cuda
    return Facts(
        platform=CUDA,
        devices=devices,
        host=host.facts,
        links=(*_host_links(query), *_peer_links(text, len(devices))),
        software=software,
        origins=origins.freeze(),
    )


def _origins(origins: Origins, index: int) -> None:
    for name in ("dot_types", "storage_types", "features"):
        rule = "instruction set of the compute capability"
        origins.note(f"devices.{index}.{name}", DERIVED, rule)
    origins.note(f"devices.{index}", PROBED, host_text.SMI_QUERY)
    origins.note(f"devices.{index}.capability", PROBED, host_text.SMI_CAPABILITY)
    origins.note("links", PROBED, "nvidia-smi; claims of the driver, not a data test")


def _device(
    gpu: SmiGpu, text: HostText, tree: PciTree | None, capabilities: Mapping[str, tuple[int, int]]
) -> DeviceFacts:
    capability = capabilities.get(gpu.bus_id or "")
    rules = None if capability is None else instructions(capability)
    pci = None if tree is None else tree.devices.get(gpu.bus_id or "")
    ecc = gpu.text(*ECC)
    return DeviceFacts(
        kind=CUDA,
        name=gpu.text("Product Name") or "NVIDIA device",
        vendor="nvidia",
        capability=capability,
        memory_bytes=gpu.size(*MEMORY_TOTAL),
        dot_types=rules.dot_types if rules else None,
        storage_types=rules.storage_types if rules else None,
        features=rules.features if rules else None,
        bus_id=gpu.bus_id,
        numa_node=numa_node(text, gpu.bus_id, tree),
        power_cap_w=gpu.number(*POWER_CAP),
        power_default_w=gpu.number(*POWER_DEFAULT),
        power_max_w=gpu.number(*POWER_MAX),
        bar_bytes=gpu.size(*WINDOW) or (None if pci is None else pci.window),
        ecc=None if ecc is None else ecc == "Enabled",
        uuid=None,
        switch=switch_of(tree, gpu.bus_id),
    )


def numa_node(text: HostText, bus_id: str | None, tree: PciTree | None) -> int | None:
    """From /sys, else from lspci; None where the firmware does not say (-1)."""
    line = (text.line(f"/sys/bus/pci/devices/{bus_id}/numa_node") or "").strip()
    if line.lstrip("-").isdigit():
        return int(line) if int(line) >= 0 else None
    device = None if tree is None else tree.devices.get(bus_id or "")
    return None if device is None else device.numa_node


def switch_of(tree: PciTree | None, bus_id: str | None) -> str | None:
    """Address of the switch (its upstream port) right above a device; "" for a root port."""
    chain = () if tree is None or bus_id is None else tree.chain(bus_id)
    if not chain:
        return None
    return chain[1].address if len(chain) > 1 else ""


def _host_links(query: SmiReport) -> list[LinkFacts]:
    found = []
    for index, gpu in enumerate(query.gpus):
        numbers = [
            gpu.number(path) for path in (GENERATION_NOW, WIDTH_NOW, GENERATION_MOST, WIDTH_MOST)
        ]
        now, width, most, wide = (int(number) if number else None for number in numbers)
        found.append(
            LinkFacts(
                source=HOST,
                target=index,
                kind="pcie",
                generation=now,
                width=width,
                max_generation=most,
                max_width=wide,
            )
        )
    return found


def _peer_links(text: HostText, count: int) -> list[LinkFacts]:
    matrices = {
        kind: parse_matrix(text.get(command) or "") for kind, command in host_text.SMI_PEERS.items()
    }
    topology = parse_matrix(text.get(host_text.SMI_TOPOLOGY) or "")

    def claim(kind: str, pair: tuple[int, int]) -> bool | None:
        word = matrices[kind].get(pair)
        return None if word in (None, "U") else word == "OK"

    found = []
    for pair in ((i, j) for i in range(count) for j in range(count) if i != j):
        path = topology.get(pair)
        kind = None if path is None else "nvlink" if path.startswith("NV") else "pcie"
        found.append(
            LinkFacts(
                source=pair[0],
                target=pair[1],
                kind=kind,
                peer_read=claim("read", pair),
                peer_write=claim("write", pair),
                peer_atomics=claim("atomics", pair),
            )
        )
    return found
