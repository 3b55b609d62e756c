"""Whether we are inside a container, what cannot be seen from there, and its /dev/shm."""

from __future__ import annotations

import re

from metainfer.doctor.finding import Finding, information, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.host_text import HostText

MOUNTS = "/proc/mounts"
MARKS = ("/.dockerenv", "/run/.containerenv")
_GROUP = re.compile(r"docker|kubepods|libpod|lxc|containerd|crio")
#: NCCL's buffers in host memory lie here; Docker's default is 64 MiB. Ours do not (ADR 0056).
LEAST_SHARED = 1 << 30
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def check(inputs: Inputs) -> list[Finding]:
    if inputs.text is None:
        return []
    inside = container(inputs.text)
    if inside is None:
        what = "whether this is a container"
        proof = inputs.text.why_not("/proc/1/cgroup")
        return [unknown("container", "process", what, evidence=proof)]
    if not inside:
        return []
    what = (
        "inside a container: switches, isolation settings and other containers' processes may be "
        "hidden; what was not seen is listed as unknown."
    )
    remedy = "Run metainfer doctor on the host once."
    found = [information("container.inside", "process", what, remedy, inside)]
    return [*found, *_shared(inputs.text)]


def container(text: HostText) -> str | None:
    """The line that gives a container away, "" outside of one, None when nothing could be read."""
    for mark in MARKS:
        if text.get(mark) is not None:
            return f"{mark} exists"
    groups, mounts = text.get("/proc/1/cgroup"), text.get(MOUNTS)
    for line in (groups or "").splitlines():
        if _GROUP.search(line):
            return f"/proc/1/cgroup: {line.strip()}"
    for line in (mounts or "").splitlines():
        words = line.split()
        if len(words) > 2 and words[1] == "/" and words[2] == "overlay":
            return f"{MOUNTS}: {' '.join(words[:3])}"
    return None if groups is None and mounts is None else ""


def _shared(text: HostText) -> list[Finding]:
    line = next(
        (
            line
            for line in (text.get(MOUNTS) or "").splitlines()
            if line.split()[1:2] == ["/dev/shm"]
        ),
        None,
    )
    if line is None:
        what = "the size of its shared memory"
        return [unknown("container.shm", "/dev/shm", what, evidence=text.why_not(MOUNTS))]
    size = re.search(r"\bsize=(\d+)([kmg]?)\b", line)
    if size is None or int(size[1]) * _UNITS[size[2]] >= LEAST_SHARED:
        return []
    held = int(size[1]) * _UNITS[size[2]]
    what = (
        f"{held >> 20} MiB of shared memory: NCCL's buffers between cards without peer access may "
        "not fit, here (--collectives nccl) and in other engines. Our collectives do not use it."
    )
    remedy = "Where NCCL is wanted, start the container with --shm-size=16g (or --ipc=host)."
    risk = "--ipc=host shares memory with every program of the host; --shm-size only takes memory"
    return [
        information("container.shm", "/dev/shm", what, remedy, f"{MOUNTS}: {line.strip()}", risk)
    ]
