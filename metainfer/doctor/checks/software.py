"""Versions that decide what can run: alone, in pairs, and packages that this card cannot use.

The pairs are ``data/software.toml``, each with its origin.
"""

from __future__ import annotations

import re
from typing import Any

from metainfer.doctor.data_files import rows
from metainfer.doctor.evidence import fact
from metainfer.doctor.finding import Finding, Severity, blocker, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA

PYTHON_MINIMUM = (3, 11)
TORCH_MINIMUM, TORCH_BELOW = (2, 11), (2, 14)
DATA = "software.toml"
RISK = "other programs of this environment may need the version that is there"


def check(inputs: Inputs) -> list[Finding]:
    found = [*_python(inputs), *_torch(inputs)]
    if inputs.facts.device.kind == CUDA:
        found += [*_triton(inputs), *_driver(inputs)]
        found += [*_pairs(inputs), *_cards(inputs)]
    return found


def version_pair(text: str | None) -> tuple[int, int] | None:
    """``2.13.0+cpu`` -> (2, 13); None when it does not start with two numbers."""
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def cuda_build(torch: str | None) -> tuple[int, int] | None:
    """The CUDA release that a torch version names: ``2.12.0+cu130`` -> (13, 0)."""
    match = re.search(r"\+cu(\d+)(\d)$", torch or "")
    return (int(match[1]), int(match[2])) if match else None


def _python(inputs: Inputs) -> list[Finding]:
    text = inputs.facts.software.get("python")
    have = version_pair(text)
    proof = fact(inputs.facts, "software.python")
    if have is None:
        return [unknown("software.python", "python", "the version of Python", evidence=proof)]
    if have < PYTHON_MINIMUM:
        what = f"Python {text} is too old."
        return [blocker("software.python", "python", what, "Use 3.11 or newer.", proof, RISK)]
    return []


def _torch(inputs: Inputs) -> list[Finding]:
    software = inputs.facts.software
    text = software.get("torch")
    proof = fact(inputs.facts, "software.torch")
    if text is None:
        if "torch" not in software:
            what = "whether torch is installed"
            return [unknown("software.torch", "torch", what, evidence=proof)]
        remedy = "pip install metainfer brings it."
        return [blocker("software.torch", "torch", "torch is not installed.", remedy, proof)]
    found = []
    have = version_pair(text)
    if have is None:
        what = f"torch reports version {text!r}"
        found.append(unknown("software.torch", "torch", what, evidence=proof))
    elif not TORCH_MINIMUM <= have < TORCH_BELOW:
        what = f"torch {text} is outside the tested range 2.11 to 2.13."
        remedy = "pip install 'torch==2.13.*'"
        found.append(blocker("software.torch", "torch", what, remedy, proof, RISK))
    if inputs.facts.device.kind == CUDA and text.endswith("+cpu"):
        what = f"torch {text} is built without CUDA, and this machine has CUDA devices."
        remedy = "Install torch's CUDA build, or run with --platform cpu."
        found.append(blocker("software.torch-build", "torch", what, remedy, proof, RISK))
    return found


def _triton(inputs: Inputs) -> list[Finding]:
    software = inputs.facts.software
    proof = fact(inputs.facts, "software.triton")
    if "triton" not in software:
        what = "whether Triton is installed"
        return [unknown("software.triton", "triton", what, evidence=proof)]
    if software["triton"] is None:
        what = "Triton is not installed: kernels written in it cannot be chosen."
        return [slows("software.triton", "triton", what, "pip install 'metainfer[gpu]'", proof)]
    return []


def _driver(inputs: Inputs) -> list[Finding]:
    software = inputs.facts.software
    if software.get("nvidia_driver") is None:
        what = "the NVIDIA driver's version; power, links and peer access may be unread too"
        proof = fact(inputs.facts, "software.nvidia_driver")
        return [unknown("software.driver", "NVML", what, "pip install nvidia-ml-py.", proof)]
    build, offered = cuda_build(software.get("torch")), version_pair(software.get("cuda_driver"))
    if build is None or offered is None or offered[0] >= build[0]:
        return []
    what = (
        f"torch {software['torch']} is built for CUDA {build[0]}.{build[1]}, the driver "
        f"{software['nvidia_driver']} offers {software['cuda_driver']}: no kernel can be loaded."
    )
    remedy = f"Install a driver for CUDA {build[0]}, or a torch built for CUDA {offered[0]}."
    proof = fact(inputs.facts, "software.cuda_driver")
    risk = "a new driver needs a reboot or that everything on the GPUs stops"
    return [blocker("software.driver-pair", "torch, driver", what, remedy, proof, risk)]


def _pairs(inputs: Inputs) -> list[Finding]:
    software, found = inputs.facts.software, []
    for row in rows(DATA, "pair"):
        left, right = (version_pair(software.get(row[side])) for side in ("left", "right"))
        if left is None or right is None or not _within(left, row, "left"):
            continue
        if _within(right, row, "right"):
            continue
        names = f"{row['left']}, {row['right']}"
        have = {side: f"{row[side]} {software[row[side]]}" for side in ("left", "right")}
        what = f"{have['left']} {row['what']}, {software[row['right']]} is installed."
        proof = f"{have['left']}, {have['right']} ({row['origin']})"
        grade = Severity(row["severity"])
        remedy = f"{row['remedy']}"
        found.append(Finding("software.pair", grade, names, what, remedy, proof, RISK))
    return found


def _within(version: tuple[int, int], row: dict[str, Any], side: str) -> bool:
    return tuple(row[f"{side}_from"]) <= version < tuple(row[f"{side}_below"])


def _cards(inputs: Inputs) -> list[Finding]:
    """A package that is installed is necessary for a kernel, never sufficient."""
    capability, found = inputs.facts.device.capability, []
    for row in rows(DATA, "card"):
        version = inputs.facts.software.get(row["package"])
        if version is None or capability is None:
            continue
        if tuple(row["from"]) <= capability <= tuple(row["to"]):
            continue
        what = (
            f"{row['package']} {version} is installed and cannot serve this card: {row['what']}, "
            f"this card has {capability[0]}.{capability[1]}."
        )
        found.append(
            information("software.card", row["package"], what, evidence=f"origin: {row['origin']}")
        )
    return found
