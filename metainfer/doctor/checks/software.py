"""Versions that decide what can run, alone and in pairs."""

from __future__ import annotations

import re

from metainfer.doctor.finding import Finding, blocker, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA

PYTHON_MINIMUM = (3, 11)
TORCH_MINIMUM, TORCH_BELOW = (2, 11), (2, 14)
#: The Triton that each CUDA release of torch pins (torch's own package metadata).
TRITON_OF_TORCH = {(2, 11): (3, 6), (2, 12): (3, 7), (2, 13): (3, 7)}


def check(inputs: Inputs) -> list[Finding]:
    found = [*_python(inputs), *_torch(inputs)]
    if inputs.facts.device.kind == CUDA:
        found += [*_triton(inputs), *_driver(inputs)]
    return found


def version_pair(text: str | None) -> tuple[int, int] | None:
    """``2.13.0+cpu`` -> (2, 13); None when it does not start with two numbers."""
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def _python(inputs: Inputs) -> list[Finding]:
    text = inputs.facts.software.get("python")
    have = version_pair(text)
    if have is None:
        return [unknown("software.python", "python", "the version of Python")]
    if have < PYTHON_MINIMUM:
        return [
            blocker("software.python", "python", f"Python {text} is too old.", "Use 3.11 or newer.")
        ]
    return []


def _torch(inputs: Inputs) -> list[Finding]:
    software = inputs.facts.software
    text = software.get("torch")
    if text is None:
        if "torch" not in software:
            return [unknown("software.torch", "torch", "whether torch is installed")]
        remedy = "pip install metainfer brings it."
        return [blocker("software.torch", "torch", "torch is not installed.", remedy)]
    found = []
    have = version_pair(text)
    if have is None:
        found.append(unknown("software.torch", "torch", f"torch reports version {text!r}"))
    elif not TORCH_MINIMUM <= have < TORCH_BELOW:
        what = f"torch {text} is outside the tested range 2.11 to 2.13."
        found.append(blocker("software.torch", "torch", what, "Install a torch from 2.11 to 2.13."))
    if inputs.facts.device.kind == CUDA and text.endswith("+cpu"):
        what = f"torch {text} is built without CUDA, and this machine has CUDA devices."
        remedy = "Install torch's CUDA build, or run with --platform cpu."
        found.append(blocker("software.torch-build", "torch", what, remedy))
    return found


def _triton(inputs: Inputs) -> list[Finding]:
    software = inputs.facts.software
    text = software.get("triton")
    if "triton" not in software:
        return [unknown("software.triton", "triton", "whether Triton is installed")]
    if text is None:
        what = "Triton is not installed: kernels written in it cannot be chosen."
        return [slows("software.triton", "triton", what, "pip install 'metainfer[gpu]'.")]
    wanted = TRITON_OF_TORCH.get(version_pair(software.get("torch")) or (0, 0))
    have = version_pair(text)
    if wanted is None or have is None or have == wanted:
        return []
    expected = f"{wanted[0]}.{wanted[1]}"
    what = f"torch {software.get('torch')} pins Triton {expected}, {text} is installed."
    return [
        information("software.pair", "torch, triton", what, f"pip install 'triton=={expected}.*'.")
    ]


def _driver(inputs: Inputs) -> list[Finding]:
    if inputs.facts.software.get("nvidia_driver") is None:
        what = "the NVIDIA driver's version; power, links and peer access may be unread too"
        return [unknown("software.driver", "NVML", what, "pip install nvidia-ml-py.")]
    return []
