"""Environment variables: typos of ours, and foreign ones that change what we do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from metainfer.core import env
from metainfer.doctor.finding import Finding, blocker, information, slows
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CPU, CUDA

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def check(inputs: Inputs) -> list[Finding]:
    if inputs.local is None:
        return []
    found = _unknown_names(inputs)
    if inputs.facts.device.kind == CUDA:
        found += [*_allocator(inputs), *_visible(inputs)]
    if inputs.facts.device.kind == CPU:
        found += _threads(inputs)
    return found


def expandable_segments(environ: Mapping[str, str]) -> str | None:
    """The variable that switches torch's growing segments on, or None.

    The option's text is a comma-separated list of ``name:value``; the later of two wins.
    """
    for name in ALLOCATOR:
        parts = (part.partition(":") for part in environ.get(name, "").split(","))
        options = {
            key.strip().lower(): value.strip().lower() for key, colon, value in parts if colon
        }
        if options.get("expandable_segments") == "true":
            return name
    return None


def _unknown_names(inputs: Inputs) -> list[Finding]:
    assert inputs.local is not None
    known = [variable.name for variable in env.VARIABLES]
    found = []
    for name in sorted(inputs.local.environ):
        if not name.startswith(env.PREFIX) or name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"unset {name}. Known: {', '.join(known)}."
        what = f"{name} is not a variable of ours; every other verb refuses to start."
        found.append(blocker("env.unknown-name", name, what, remedy, f"{name} is set"))
    return found


def _allocator(inputs: Inputs) -> list[Finding]:
    assert inputs.local is not None
    name = expandable_segments(inputs.local.environ)
    if name is None:
        return []
    what = (
        "memory of growing segments cannot be exported to another process; buffers that ranks "
        "share are allocated outside that allocator."
    )
    proof, remedy = f"{name}={inputs.local.environ[name]}", f"unset {name}, if an export fails."
    risk = "memory may fragment more"
    return [information("env.expandable-segments", name, what, remedy, proof, risk)]


def _visible(inputs: Inputs) -> list[Finding]:
    assert inputs.local is not None
    value = inputs.local.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return []
    shown = f"only devices {value!r} are seen" if value.strip() else "every CUDA device is hidden"
    what = (
        f"{shown}, in this order; CUDA_DEVICE_ORDER says how they count (fastest first if unset)."
    )
    proof = f"CUDA_VISIBLE_DEVICES={value}"
    return [information("env.visible-devices", "CUDA_VISIBLE_DEVICES", what, evidence=proof)]


def _threads(inputs: Inputs) -> list[Finding]:
    assert inputs.local is not None
    cores, found = inputs.facts.host.usable_cores, []
    for name in THREADS:
        text = inputs.local.environ.get(name, "").split(",")[0].strip()
        if not text.isdigit() or cores is None:
            continue
        if int(text) < cores:
            what = f"{name}={text} leaves {cores - int(text)} of {cores} usable cores idle."
        elif int(text) > cores:
            what = f"{name}={text} starts more threads than the {cores} usable cores."
        else:
            continue
        remedy = f"unset {name}, or set it to {cores}."
        found.append(slows("env.threads", name, what, remedy, f"{name}={text}"))
    return found
