"""Power cap, error correction and unknown instruction sets of GPUs."""

from __future__ import annotations

from metainfer.doctor.checks.links import where
from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA, DeviceFacts


def check(inputs: Inputs) -> list[Finding]:
    if inputs.facts.device.kind != CUDA:
        return []
    found: list[Finding] = []
    for index, device in enumerate(inputs.facts.devices):
        found += [
            *_power(index, device),
            *_correction(index, device),
            *_instructions(index, device),
        ]
    found += _unlike(inputs)
    return found


def _power(index: int, device: DeviceFacts) -> list[Finding]:
    cap, usual = device.power_cap_w, device.power_default_w
    place = where(index, device)
    if cap is None or usual is None:
        return [unknown("gpu.power", place, "its power cap")]
    if cap >= usual:
        return []
    what = f"its power cap is {cap:.0f} W of {usual:.0f} W; matrix speed follows the cap."
    remedy = f"nvidia-smi -i {index} -pl {usual:.0f}, if cooling and supply allow it."
    return [slows("gpu.power", place, what, remedy)]


def _correction(index: int, device: DeviceFacts) -> list[Finding]:
    if device.ecc is None:
        return [unknown("gpu.ecc", where(index, device), "whether memory errors are corrected")]
    state = "on" if device.ecc else "off"
    return [information("gpu.ecc", where(index, device), f"error correction is {state}.")]


def _instructions(index: int, device: DeviceFacts) -> list[Finding]:
    place = where(index, device)
    if device.capability is None:
        return [unknown("gpu.capability", place, "its compute capability")]
    if device.dot_types is None:
        major, minor = device.capability
        what = f"which instructions capability {major}.{minor} has; kernels that need one refuse"
        return [unknown("gpu.instructions", place, what, "Run a newer release.")]
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
    return [slows("gpu.unlike", "all GPUs", what, "Choose equal ones with CUDA_VISIBLE_DEVICES.")]
