"""Address translation between GPUs: translated, passed through, or off."""

from __future__ import annotations

from metainfer.doctor.evidence import fact, file_line
from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA

RISK = (
    "devices then reach all of host memory: not on a host that hands devices to untrusted virtual "
    "machines; needs a reboot"
)


def check(inputs: Inputs) -> list[Finding]:
    if inputs.facts.device.kind != CUDA or len(inputs.facts.devices) < 2:
        return []
    mode = inputs.facts.host.iommu
    if mode is None:
        what = "whether the IOMMU translates peer traffic (not readable here)"
        remedy = "Look outside the container, as root." if inputs.local is not None else ""
        return [unknown("link.iommu", "IOMMU", what, remedy, _why_not(inputs))]
    if mode == "off":
        what = "the IOMMU is off: peer traffic is not translated, devices are not isolated."
        return [information("link.iommu-off", "IOMMU", what, evidence=_proof(inputs))]
    if mode != "translated":
        return []
    what = "the IOMMU translates device addresses: peer traffic is slow and can arrive corrupted."
    remedy = (
        "Boot with iommu=pt, or disable the IOMMU in the firmware if no virtual machine needs it."
    )
    return [slows("link.iommu", "IOMMU", what, remedy, _proof(inputs), RISK)]


def _proof(inputs: Inputs) -> str:
    if inputs.text is not None:
        for key, body in inputs.text.matching(r"/sys/kernel/iommu_groups/\d+/type"):
            if body.strip().startswith("DMA"):
                return f"{key[0]}: {body.strip()}; {file_line(inputs.text, '/proc/cmdline')}"
        return file_line(inputs.text, "/proc/cmdline")
    return fact(inputs.facts, "host.iommu")


def _why_not(inputs: Inputs) -> str:
    if inputs.text is None:
        return fact(inputs.facts, "host.iommu")
    return inputs.text.why_not("/sys/kernel/iommu_groups/")
