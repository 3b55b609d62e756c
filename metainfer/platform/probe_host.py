"""Reads the host: processor, usable cores, memory, NUMA, C compiler, IOMMU. Never raises.

Everything is read below a `root` folder, so that tests bring their own machine. Container limits
count: usable cores are the smallest of the affinity mask and the CPU quota (rounded down, at least
one: threads above the quota are throttled in bursts), memory the smallest of the machine's and the
control group's limit. What cannot be read is None.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from metainfer.platform.facts import HostFacts
from metainfer.platform.origins import PROBED, Origins
from metainfer.platform.text_root import Folder

COMPILERS = ("cc", "gcc", "clang")
COMPILER_TIMEOUT_S = 5.0
_NO_LIMIT = 1 << 60  # control groups write 2**63 rounded down to a page for "no limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProbe:
    """Host facts, the processor's feature words, free memory now, and the origins of each."""

    facts: HostFacts
    cpu_features: frozenset[str] | None
    available_bytes: int | None
    machine_cores: int | None  # before affinity and quota
    machine_memory_bytes: int | None  # before the control group's limit
    origins: dict[str, str]


def probe_host(
    root: Folder = Path("/"), find_compiler: Callable[[], str | None] | None = None
) -> HostProbe:
    """Read everything once. Takes milliseconds, plus one ``cc --version``."""
    origins = Origins()
    cpuinfo = read_text(root / "proc/cpuinfo")
    machine_memory = meminfo(root, "MemTotal")
    group_memory = memory_limit(root)
    memory = _least(machine_memory, group_memory)
    cores, how = usable_cores(root)
    facts = HostFacts(
        processor=processor_name(cpuinfo),
        architecture=platform.machine() or None,
        physical_cores=physical_cores(root),
        usable_cores=cores,
        memory_bytes=memory,
        numa_nodes=numa_nodes(root),
        sockets=sockets(root),
        compiler=(find_compiler or compiler)(),
        iommu=iommu_mode(root),
        kernel=_kernel(root),
    )
    limited = group_memory is not None and memory == group_memory
    for name, source in (
        ("processor", "/proc/cpuinfo"),
        ("architecture", "uname"),
        ("physical_cores", "/sys/devices/system/cpu"),
        ("usable_cores", how),
        ("memory_bytes", "control group limit" if limited else "/proc/meminfo"),
        ("numa_nodes", "/sys/devices/system/node"),
        ("sockets", "/sys/devices/system/cpu"),
        ("compiler", "--version"),
        ("iommu", "/sys/kernel/iommu_groups"),
        ("kernel", "/proc/sys/kernel/osrelease"),
    ):
        origins.note(f"host.{name}", PROBED, source)
    return HostProbe(
        facts=facts,
        cpu_features=cpu_features(cpuinfo),
        available_bytes=available_memory(root),
        machine_cores=_online_cores(root),
        machine_memory_bytes=machine_memory,
        origins=origins.freeze(),
    )


def read_text(path: Folder) -> str | None:
    """The file's text, or None when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def processor_name(cpuinfo: str | None) -> str | None:
    """The first model name; Arm kernels give none, then implementer and part stand in."""
    fields = dict(_pairs(cpuinfo or ""))
    for key in ("model name", "Model", "Hardware", "cpu model"):
        if fields.get(key):
            return fields[key]
    if "CPU implementer" in fields and "CPU part" in fields:
        return f"implementer {fields['CPU implementer']} part {fields['CPU part']}"
    return None


def cpu_features(cpuinfo: str | None) -> frozenset[str] | None:
    """Feature words that every processor of the machine has; None when the file is silent."""
    lines = [value for key, value in _pairs(cpuinfo or "") if key.lower() in ("flags", "features")]
    if not lines:
        return None
    common = frozenset(lines[0].split())
    for line in lines[1:]:
        common &= frozenset(line.split())
    return common


def usable_cores(root: Folder = Path("/")) -> tuple[int | None, str]:
    """Cores this process may keep busy, and which limit says so."""
    limits: list[tuple[int, str]] = []
    affinity = _affinity(root)
    if affinity is not None:
        limits.append((affinity, "affinity mask"))
    quota = cpu_quota(root)
    if quota is not None:
        limits.append((max(1, int(quota)), "control group quota"))
    if not limits:
        online = _online_cores(root)
        return online, "online processors"
    return min(limits)


def cpu_quota(root: Folder = Path("/")) -> float | None:
    """The tightest CPU quota over this process's control groups, in cores; None without one."""
    quotas = []
    for folder in _group_folders(root, "cpu"):
        words = (read_text(folder / "cpu.max") or "").split()
        if len(words) < 2:
            words = [
                (read_text(folder / "cpu.cfs_quota_us") or "").strip(),
                (read_text(folder / "cpu.cfs_period_us") or "").strip(),
            ]
        quota, period = _integer(words[0]), _integer(words[1])
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory_limit(root: Folder = Path("/")) -> int | None:
    """The tightest memory limit over this process's control groups, in bytes; None without one."""
    limits = []
    for folder in _group_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            value = _integer((read_text(folder / name) or "").strip())
            if value is not None and value < _NO_LIMIT:
                limits.append(value)
    return min(limits, default=None)


def available_memory(root: Folder = Path("/")) -> int | None:
    """Bytes that can be taken now without swapping, control groups included."""
    return memory_room(root)[0]


def memory_room(root: Folder = Path("/")) -> tuple[int | None, str]:
    """`available_memory`, and which limit says so.

    Pages of files that a control group could drop count as free, as they do in the kernel's number
    for the machine: a container that has read a checkpoint is not full.
    """
    rooms: list[tuple[int, str]] = []
    free = meminfo(root, "MemAvailable")
    if free is not None:
        rooms.append((free, "MemAvailable in /proc/meminfo"))
    for folder in _group_folders(root, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _integer((read_text(folder / limit_name) or "").strip())
            used = _integer((read_text(folder / used_name) or "").strip())
            if limit is not None and used is not None and limit < _NO_LIMIT:
                room = limit - used + min(used, _file_pages(folder))
                how = f"control group limit of {limit:,} B, {used:,} B of it used"
                rooms.append((max(0, room), how))
    return min(rooms, default=(None, "not known"))


def _file_pages(folder: Folder) -> int:
    """Bytes of files in a control group's memory; version 1 has its children's under ``total_``."""
    rows = (line.split() for line in (read_text(folder / "memory.stat") or "").splitlines())
    held = {row[0]: _integer(row[1]) or 0 for row in rows if len(row) == 2}
    return sum(
        held.get(f"total_{name}", held.get(name, 0)) for name in ("inactive_file", "active_file")
    )


def meminfo(root: Folder, field: str) -> int | None:
    """One line of ``/proc/meminfo`` in bytes."""
    for key, value in _pairs(read_text(root / "proc/meminfo") or ""):
        words = value.split()
        if key == field and words:
            kib = _integer(words[0])
            return None if kib is None else kib * 1024
    return None


def physical_cores(root: Folder = Path("/")) -> int | None:
    """Distinct sets of sibling threads."""
    pattern = "sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list"
    groups = {read_text(path) for path in root.glob(pattern)} - {None}
    return len(groups) or None


def sockets(root: Folder = Path("/")) -> int | None:
    """Distinct processor packages."""
    pattern = "sys/devices/system/cpu/cpu[0-9]*/topology/physical_package_id"
    return len({read_text(path) for path in root.glob(pattern)} - {None}) or None


def numa_nodes(root: Folder = Path("/")) -> int | None:
    """Memory nodes of the machine."""
    return len(list(root.glob("sys/devices/system/node/node[0-9]*"))) or None


def iommu_mode(root: Folder = Path("/")) -> str | None:
    """``off``, ``pass-through``, ``translated`` or None.

    From the types of the IOMMU groups: a single translated group is enough to say translated.
    Groups without a readable type fall back to the kernel command line.
    """
    groups = root / "sys/kernel/iommu_groups"
    try:
        folders: list[Folder] = list(groups.iterdir())
        units = list((root / "sys/class/iommu").iterdir())
    except OSError:
        return None
    if not folders:
        return None if units else "off"
    types = {(read_text(folder / "type") or "").strip() for folder in folders} - {""}
    if any(kind.startswith("DMA") for kind in types):
        return "translated"
    if types == {"identity"}:
        return "pass-through"
    words = (read_text(root / "proc/cmdline") or "").split()
    if "iommu=pt" in words or "iommu.passthrough=1" in words:
        return "pass-through"
    return None


def compiler() -> str | None:
    """``command: version line`` of ``$CC``, else of the first of cc, gcc, clang that answers."""
    own = os.environ.get("CC", "").strip()
    try:
        candidates = [shlex.split(own)] if own else [[name] for name in COMPILERS]
    except ValueError:
        return None
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(
                [*command, "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMPILER_TIMEOUT_S,
                check=False,
                text=True,
                errors="replace",
            )
        except (OSError, subprocess.SubprocessError):
            continue
        line = done.stdout.strip().partition("\n")[0].strip()
        if done.returncode == 0 and line:
            return f"{command[0]}: {line}"
    return None


def _kernel(root: Folder) -> str | None:
    return (read_text(root / "proc/sys/kernel/osrelease") or "").strip() or None


def _affinity(root: Folder) -> int | None:
    """From ``/proc/self/status``, which Linux keeps current; else from the system call."""
    for key, value in _pairs(read_text(root / "proc/self/status") or ""):
        if key == "Cpus_allowed_list":
            return _count_list(value)
    if root == Path("/") and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return None


def _online_cores(root: Folder) -> int | None:
    text = read_text(root / "sys/devices/system/cpu/online")
    if text is not None:
        return _count_list(text)
    return os.cpu_count() if root == Path("/") else None


def members(text: str) -> frozenset[int] | None:
    """The numbers of a kernel list such as ``0-3,8``; None when it is no such list."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if found is None:
            return None
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return frozenset(numbers)


def _count_list(text: str) -> int | None:
    return len(members(text) or ()) or None


def _group_folders(root: Folder, controller: str) -> Iterator[Folder]:
    """This process's control group folders for one controller, innermost first, both versions.

    Inside a container the path of ``/proc/self/cgroup`` may not exist below the mount; the mount's
    own root is then the container's group and is always looked at.
    """
    mounts = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[1] == "":
            base = mounts
        elif controller in parts[1].split(","):
            base = mounts / controller
            if not base.exists():
                base = mounts / parts[1]
        else:
            continue
        inner = Path(parts[2].lstrip("/"))
        if ".." not in inner.parts:
            yield from (base / folder for folder in (inner, *inner.parents))
        else:
            yield base


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)
