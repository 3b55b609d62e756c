"""Error correction, unknown instruction sets and unequal cards."""

from __future__ import annotations

from metainfer.doctor.evidence import fact, smi_line, where
from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA
from metainfer.platform.text_facts import ECC


def check(inputs: Inputs) -> list[Finding]:
    if inputs.facts.device.kind != CUDA:
        return []
    found: list[Finding] = []
    for index in range(len(inputs.facts.devices)):
        found += [*_correction(inputs, index), *_instructions(inputs, index)]
    return [*found, *_unlike(inputs)]


def _correction(inputs: Inputs, index: int) -> list[Finding]:
    device = inputs.facts.devices[index]
    proof = smi_line(inputs, index, ECC, "ecc")
    if device.ecc is None:
        what = "whether memory errors are corrected"
        return [unknown("gpu.ecc", where(index, device), what, evidence=proof)]
    state = "on" if device.ecc else "off"
    what = f"error correction is {state}."
    return [information("gpu.ecc", where(index, device), what, evidence=proof)]


def _instructions(inputs: Inputs, index: int) -> list[Finding]:
    device = inputs.facts.devices[index]
    place = where(index, device)
    proof = fact(inputs.facts, f"devices.{index}.capability")
    if device.capability is None:
        what = "its compute capability"
        return [unknown("gpu.capability", place, what, evidence=proof)]
    if device.dot_types is None:
        major, minor = device.capability
        what = f"which instructions capability {major}.{minor} has; kernels that need one refuse"
        return [unknown("gpu.instructions", place, what, "Run a newer release.", proof)]
    return []


def _unlike(inputs: Inputs) -> list[Finding]:
    kinds = {
        (device.name, device.capability, device.units, device.memory_bytes)
        for device in inputs.facts.devices
    }
    if len(kinds) < 2:
        return []
    names = ", ".join(sorted({device.name for device in inputs.facts.devices}))
    what = f"the GPUs differ ({names}); plans assume devices that are alike."
    proof = "; ".join(
        fact(inputs.facts, f"devices.{index}.name") for index in range(len(inputs.facts.devices))
    )
    remedy = "Choose equal ones with CUDA_VISIBLE_DEVICES."
    risk = "the other cards stay idle"
    return [slows("gpu.unlike", "all GPUs", what, remedy, proof, risk)]
