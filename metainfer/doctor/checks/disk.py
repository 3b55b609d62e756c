"""Space and permission in the cache folder: models, compiled kernels and records live there."""

from __future__ import annotations

from metainfer.doctor.finding import Finding, blocker, slows, unknown
from metainfer.doctor.inputs import Inputs

GIB = 1 << 30
LEAST = GIB // 4  # compiled kernels and records
LITTLE = 4 * GIB  # and a small model


def check(inputs: Inputs) -> list[Finding]:
    if inputs.local is None or inputs.local.disk is None:
        return []
    disk = inputs.local.disk
    place, remedy = str(disk.folder), "Free space there, or point METAINFER_CACHE elsewhere."
    proof = f"{place}: writable {disk.writable}, free bytes {disk.free_bytes}"
    if not disk.writable:
        what = "the cache folder cannot be written: no kernel can be built, nothing is kept."
        return [blocker("disk.permission", place, what, "Point METAINFER_CACHE elsewhere.", proof)]
    if disk.free_bytes is None:
        return [unknown("disk.space", place, "how much space is free", evidence=proof)]
    what = f"{disk.free_bytes / GIB:.1f} GiB are free for models, kernels and records."
    if disk.free_bytes < LEAST:
        return [blocker("disk.space", place, what, remedy, proof)]
    if disk.free_bytes < LITTLE:
        return [slows("disk.space", place, what, remedy, proof)]
    return []
