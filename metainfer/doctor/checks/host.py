"""Cores and compiler: the host and the limits a container puts on it."""

from __future__ import annotations

from metainfer.doctor.evidence import fact, file_line
from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.host_text import COMPILER


def check(inputs: Inputs) -> list[Finding]:
    return [*_cores(inputs), *_compiler(inputs)]


def _cores(inputs: Inputs) -> list[Finding]:
    usable = inputs.facts.host.usable_cores
    proof = fact(inputs.facts, "host.usable_cores")
    if usable is None:
        what = "how many cores this process may use"
        return [unknown("host.cores", "processor", what, evidence=proof)]
    if inputs.local is None:
        return []
    machine = inputs.local.host.machine_cores
    if machine is None or usable >= machine:
        return []
    source = inputs.local.host.origins.get("host.usable_cores", "").removeprefix("probed: ")
    what = f"{usable} of the machine's {machine} processors may be used ({source})."
    remedy = "Raise the container's CPU limit."
    return [information("host.cores", "processor", what, remedy, proof)]


def _compiler(inputs: Inputs) -> list[Finding]:
    if inputs.facts.host.compiler is not None:
        return []
    proof = file_line(inputs.text, COMPILER) or fact(inputs.facts, "host.compiler")
    if inputs.local is None:
        what = "whether there is a C compiler"
        return [unknown("host.compiler", "C compiler", what, evidence=proof)]
    what = "no C compiler answers: C kernels cannot be built, and Triton cannot start kernels."
    remedy = "Install gcc or clang, or set CC."
    return [slows("host.compiler", "C compiler", what, remedy, proof)]
