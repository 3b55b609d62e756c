"""The memory window of each GPU on the bus: too small a one hides most of its memory from peers."""

from __future__ import annotations

from metainfer.doctor.evidence import pci_of, smi_line, where
from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA
from metainfer.platform.text_facts import WINDOW

SMALL_WINDOW = 256 << 20


def check(inputs: Inputs) -> list[Finding]:
    if inputs.facts.device.kind != CUDA:
        return []
    return [
        finding for index in range(len(inputs.facts.devices)) for finding in _window(inputs, index)
    ]


def _window(inputs: Inputs, index: int) -> list[Finding]:
    device = inputs.facts.devices[index]
    window, memory = device.bar_bytes, device.memory_bytes
    proof = _proof(inputs, index)
    place = where(index, device)
    if window is None:
        return [unknown("link.window", place, "the size of its memory window", evidence=proof)]
    if memory is None or window > SMALL_WINDOW or window >= memory:
        return []
    what = f"its memory window is {window >> 20} MiB: peers cannot reach most of its memory."
    remedy = "Enable resizable BAR and above-4G decoding in the firmware."
    make = slows if len(inputs.facts.devices) > 1 else information
    risk = "a board with old firmware may not boot with it; keep a way to reset the settings"
    return [make("link.window", place, what, remedy, proof, risk)]


def _proof(inputs: Inputs, index: int) -> str:
    bus_id = inputs.facts.devices[index].bus_id
    pci = pci_of(inputs, bus_id)
    if pci is not None and "window" in pci.lines:
        return f"lspci: {bus_id} {pci.lines['window']}"
    return smi_line(inputs, index, WINDOW, "bar_bytes")
