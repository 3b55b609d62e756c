"""Kernels that were proven, built or tuned for another architecture than this card's.

Said of each chosen kernel from the evidence we ship; and of extensions that torch would build here
for other cards only (``TORCH_CUDA_ARCH_LIST``).
"""

from __future__ import annotations

import re

from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.kernels.evidence import shipped
from metainfer.kernels.impl import Evidence
from metainfer.platform.facts import CUDA

ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
#: Names that torch takes for capabilities (torch.utils.cpp_extension).
NAMED = {
    "Volta": "7.0",
    "Turing": "7.5",
    "Ampere": "8.0;8.6",
    "Ada": "8.9",
    "Hopper": "9.0",
    "Blackwell": "10.0;12.0",
}


def check(inputs: Inputs) -> list[Finding]:
    return [*_chosen(inputs), *_built(inputs)]


def target(inputs: Inputs) -> str | None:
    """This device as evidence names it: ``sm_120``, or the processor's architecture."""
    device = inputs.facts.device
    if device.kind == CUDA:
        pair = device.capability
        return None if pair is None else f"sm_{pair[0]}{pair[1]}"
    return inputs.facts.host.architecture


def _chosen(inputs: Inputs) -> list[Finding]:
    if inputs.model is None:
        return []
    here = target(inputs)
    foreign: dict[str, str] = {}
    for choice in inputs.model.selection.bundle.choices:
        if choice.evidence is Evidence.THIS_CARD or choice.impl.id in foreign:
            continue
        runs = shipped().get(choice.impl.id, ())
        if here is not None and any(run.arch == here for run in runs):
            continue
        listed = "; ".join(f"{run.arch}: {run.how}" for run in runs)
        foreign[choice.impl.id] = listed or f"no run anywhere, evidence '{choice.evidence.value}'"
    if not foreign:
        return []
    what = (
        f"{len(foreign)} chosen kernels never ran on {here or 'this architecture'}: "
        f"{', '.join(sorted(foreign))}. Each goes through its op's cases at the first start."
    )
    proof = " | ".join(f"{impl}: {runs}" for impl, runs in sorted(foreign.items()))
    return [information("ops.other-architecture", "kernels", what, evidence=proof)]


def _built(inputs: Inputs) -> list[Finding]:
    if inputs.local is None or inputs.facts.device.kind != CUDA:
        return []
    value = inputs.local.environ.get(ARCH_LIST, "").strip()
    if not value:
        return []
    proof, capability = f"{ARCH_LIST}={value}", inputs.facts.device.capability
    if capability is None:
        what = "whether extensions built here run on this card"
        return [unknown("env.arch-list", ARCH_LIST, what, evidence=proof)]
    if covers(value, capability):
        return []
    what = (
        f"extensions built here are for other cards than {capability[0]}.{capability[1]}: they "
        "fail to load, or fall back."
    )
    remedy = f"unset {ARCH_LIST}"
    risk = "extensions are built again"
    return [slows("env.arch-list", ARCH_LIST, what, remedy, proof, risk)]


def covers(value: str, capability: tuple[int, int]) -> bool:
    """Whether code for this list runs on a card: same major, no newer minor; or PTX not newer."""
    for name, numbers in NAMED.items():
        value = re.sub(rf"\b{name}\b", numbers, value)
    for major, minor, letter, ptx in re.findall(r"(\d+)\.(\d+)([af]?)(\+PTX)?", value):
        pair = (int(major), int(minor))
        if letter == "a":
            if pair == capability:
                return True
        elif (pair[0] == capability[0] and pair <= capability) or (ptx and pair <= capability):
            return True
    return False
