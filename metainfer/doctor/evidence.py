"""Where a finding was read: the raw line if the host text has it, else the fact and its origin."""

from __future__ import annotations

from typing import Any

from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import DeviceFacts, Facts
from metainfer.platform.host_text import HostText
from metainfer.platform.lspci import PciDevice
from metainfer.platform.nvidia_smi import SmiGpu
from metainfer.platform.text_facts import read_query, read_tree


def where(index: int, device: DeviceFacts) -> str:
    """A device in the words of every finding about it."""
    return f"GPU {index} ({device.bus_id or 'bus id unknown'}, {device.name})"


def fact(facts: Facts, path: str) -> str:
    """``devices.1.ecc = True (probed: NVML)``; the origin of the nearest part of the path."""
    value: Any = facts
    for part in path.split("."):
        if isinstance(value, tuple):
            value = value[int(part)]
        elif isinstance(value, dict):
            value = value.get(part)
        else:
            value = getattr(value, part)
    return f"{path} = {value} ({origin_of(facts, path)})"


def origin_of(facts: Facts, path: str) -> str:
    """The origin of a value, or of the nearest part of its path that has one."""
    part = path
    while part and part not in facts.origins:
        part = part.rpartition(".")[0]
    return facts.origins.get(part, "origin not recorded")


def smi_of(inputs: Inputs, bus_id: str | None) -> SmiGpu | None:
    """The GPU's part of ``nvidia-smi -q``."""
    query = None if inputs.text is None else read_query(inputs.text)
    if query is None or bus_id is None:
        return None
    return next((gpu for gpu in query.gpus if gpu.bus_id == bus_id), None)


def smi_index(inputs: Inputs, index: int) -> int | None:
    """The number by which NVIDIA's tools know a device: they count by bus, CUDA need not."""
    query = None if inputs.text is None else read_query(inputs.text)
    bus_id = inputs.facts.devices[index].bus_id
    listed = [] if query is None else [gpu.bus_id for gpu in query.gpus]
    return listed.index(bus_id) if bus_id in listed else None


def pci_of(inputs: Inputs, bus_id: str | None) -> PciDevice | None:
    """The device's part of the lspci text."""
    tree = None if inputs.text is None else read_tree(inputs.text)
    return None if tree is None else tree.devices.get(bus_id or "")


def smi_line(inputs: Inputs, index: int, paths: tuple[str, ...], name: str) -> str:
    """The raw line of nvidia-smi, else the fact `name` of the device."""
    gpu = smi_of(inputs, inputs.facts.devices[index].bus_id)
    line = "" if gpu is None else gpu.line(*paths)
    return (
        f"nvidia-smi -q: {paths[0].rpartition('/')[0]}: {line}"
        if line
        else fact(inputs.facts, f"devices.{index}.{name}")
    )


def file_line(text: HostText | None, key: str, marked: str = "") -> str:
    """``key: line``, the first line that holds `marked`; why there is none otherwise."""
    if text is None:
        return ""
    body = text.get(key)
    if body is None:
        return text.why_not(key)
    for line in body.splitlines():
        if marked in line:
            return f"{key}: {line.strip()}"
    return f"{key}: {body.strip()[:120]}"
