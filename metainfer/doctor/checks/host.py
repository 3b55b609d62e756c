"""Cores, memory, compiler, huge pages: the host and the limits a container puts on it."""

from __future__ import annotations

from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CPU

GIB = 1 << 30


def check(inputs: Inputs) -> list[Finding]:
    found = [*_cores(inputs), *_memory(inputs), *_compiler(inputs)]
    if inputs.local is not None and inputs.facts.device.kind == CPU:
        found += _huge_pages(inputs)
    return found


def _cores(inputs: Inputs) -> list[Finding]:
    usable = inputs.facts.host.usable_cores
    if usable is None:
        return [unknown("host.cores", "processor", "how many cores this process may use")]
    if inputs.local is None:
        return []
    machine = inputs.local.host.machine_cores
    if machine is None or usable >= machine:
        return []
    source = inputs.local.host.origins.get("host.usable_cores", "").removeprefix("probed: ")
    what = f"{usable} of the machine's {machine} processors may be used ({source})."
    return [information("host.cores", "processor", what, "Raise the container's CPU limit.")]


def _memory(inputs: Inputs) -> list[Finding]:
    memory = inputs.facts.host.memory_bytes
    if memory is None:
        return [unknown("host.memory", "memory", "how much memory this process may use")]
    if inputs.local is None:
        return []
    found = []
    machine = inputs.local.host.machine_memory_bytes
    if machine is not None and memory < machine:
        what = (
            f"{memory / GIB:.1f} of the machine's {machine / GIB:.1f} GiB may be used "
            "(control group limit)."
        )
        remedy = "Raise the container's memory limit."
        found.append(information("host.memory", "memory", what, remedy))
    free = inputs.local.host.available_bytes
    if free is not None and free < memory // 4:
        what = f"{free / GIB:.1f} of {memory / GIB:.1f} GiB are free; the rest is in use."
        found.append(information("host.memory-free", "memory", what, "Stop other programs."))
    return found


def _compiler(inputs: Inputs) -> list[Finding]:
    if inputs.facts.host.compiler is not None:
        return []
    if inputs.local is None:
        return [unknown("host.compiler", "C compiler", "whether there is a C compiler")]
    what = "no C compiler answers: C kernels cannot be built, and Triton cannot start kernels."
    return [slows("host.compiler", "C compiler", what, "Install gcc or clang, or set CC.")]


def _huge_pages(inputs: Inputs) -> list[Finding]:
    assert inputs.local is not None
    text = inputs.local.huge_pages
    if text is None:
        what = "whether transparent huge pages are on"
        return [unknown("host.huge-pages", "transparent_hugepage", what)]
    if "[never]" not in text:
        return []
    where = "/sys/kernel/mm/transparent_hugepage/enabled"
    what = "transparent huge pages are off; large weights then cost more address look-ups."
    return [information("host.huge-pages", where, what, "Write madvise or always to that file.")]
