"""Memory: what others hold on the GPUs, limits on the host's, overcommit, huge pages."""

from __future__ import annotations

from metainfer.doctor.evidence import fact, file_line, smi_of, where
from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CPU, CUDA
from metainfer.platform.host_text import SMI_QUERY
from metainfer.platform.text_facts import MEMORY_USED

GIB = 1 << 30
#: The driver and a display server hold this much of a card that nobody computes on.
UNUSED_BYTES = GIB
OVERCOMMIT = "/proc/sys/vm/overcommit_memory"
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


def check(inputs: Inputs) -> list[Finding]:
    found = _host(inputs)
    if inputs.local is not None and inputs.facts.device.kind == CPU:
        found += _huge_pages(inputs)
    if inputs.text is not None:
        found += _overcommit(inputs)
        if inputs.facts.device.kind == CUDA:
            for index in range(len(inputs.facts.devices)):
                found += _device(inputs, index)
    return found


def _host(inputs: Inputs) -> list[Finding]:
    memory = inputs.facts.host.memory_bytes
    proof = fact(inputs.facts, "host.memory_bytes")
    if memory is None:
        what = "how much memory this process may use"
        return [unknown("host.memory", "memory", what, evidence=proof)]
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
        found.append(information("host.memory", "memory", what, remedy, proof))
    free = inputs.local.host.available_bytes
    if free is not None and free < memory // 4:
        what = f"{free / GIB:.1f} of {memory / GIB:.1f} GiB are free; the rest is in use."
        line = file_line(inputs.text, "/proc/meminfo", "MemAvailable")
        remedy, risk = "Stop other programs.", "their work is lost"
        found.append(information("host.memory-free", "memory", what, remedy, line, risk))
    return found


def _huge_pages(inputs: Inputs) -> list[Finding]:
    assert inputs.local is not None
    text = inputs.local.huge_pages
    if text is None:
        what = "whether transparent huge pages are on"
        proof = "" if inputs.text is None else inputs.text.why_not(HUGE_PAGES)
        return [unknown("host.huge-pages", "transparent_hugepage", what, evidence=proof)]
    if "[never]" not in text:
        return []
    what = "transparent huge pages are off; large weights then cost more address look-ups."
    remedy = f"As root: echo madvise > {HUGE_PAGES}"
    risk = "programs that ask for huge pages may use more memory; lasts until the next boot"
    proof = f"{HUGE_PAGES}: {text.strip()}"
    return [information("host.huge-pages", HUGE_PAGES, what, remedy, proof, risk)]


def _overcommit(inputs: Inputs) -> list[Finding]:
    assert inputs.text is not None
    mode = (inputs.text.line(OVERCOMMIT) or "").strip()
    if not mode:
        what = "whether the kernel promises more memory than it has"
        proof = inputs.text.why_not(OVERCOMMIT)
        return [unknown("host.overcommit", OVERCOMMIT, what, evidence=proof)]
    if mode != "2":
        return []
    what = (
        "the kernel promises no more memory than it has: mapping a checkpoint or pinning buffers "
        "can be refused while memory is free."
    )
    remedy = "As root: sysctl vm.overcommit_memory=0"
    risk = "when memory runs out a program is killed instead of an allocation being refused"
    proof = f"{OVERCOMMIT}: {mode}"
    return [slows("host.overcommit", OVERCOMMIT, what, remedy, proof, risk)]


def _device(inputs: Inputs, index: int) -> list[Finding]:
    """Memory of the card that is taken before we start."""
    assert inputs.text is not None
    device = inputs.facts.devices[index]
    place = where(index, device)
    gpu = smi_of(inputs, device.bus_id)
    used = None if gpu is None else gpu.size(*MEMORY_USED)
    if gpu is None or used is None or device.memory_bytes is None:
        what = "how much of its memory is in use"
        proof = inputs.text.why_not(SMI_QUERY) if gpu is None else gpu.line(*MEMORY_USED)
        return [unknown("gpu.memory", place, what, evidence=proof)]
    if used < UNUSED_BYTES and not gpu.processes:
        return []
    total = device.memory_bytes
    proof = f"nvidia-smi -q: FB Memory Usage: {gpu.line(*MEMORY_USED)}"
    if gpu.processes:
        holders = ", ".join(f"{p.name} (process {p.pid})" for p in gpu.processes[:4])
        more = len(gpu.processes) - 4
        holders += f" and {more} more" if more > 0 else ""
        numbers = " ".join(str(p.pid) for p in gpu.processes)
        remedy, risk = f"Stop them: kill {numbers}", "their work is lost"
    else:
        holders = "processes that are not visible from here"
        remedy = "Look outside the container, or as root, for who holds it, and stop that."
        risk = "its work is lost"
    what = f"{used / GIB:.1f} of {total / GIB:.1f} GiB are held by {holders}."
    return [slows("gpu.memory", place, what, remedy, proof, risk)]
