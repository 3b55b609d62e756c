"""Where the time of a device's steps goes: kernels by their share, and the host's gaps."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch


def kernel_shares(step: Callable[[], object], steps: int, most: int = 60) -> dict[str, Any]:
    """Per step of `steps` calls: wall, device-busy and idle seconds, launches, largest kernels.

    The profiler lengthens host work, so idle time is an upper bound; kernel times are as measured
    by the device.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
    times: dict[str, list[float]] = {}
    ran = []
    for event in traced.events():
        if event.device_type == DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.device_time / 1e6)
            ran.append((event.time_range.start, event.time_range.end, event.name))
    ran.sort()
    gaps = sorted(
        (
            ((after[0] - before[1]) / 1e6, before[2][:50], after[2][:50])
            for before, after in pairwise(ran)
        ),
        reverse=True,
    )
    largest = sorted(times.items(), key=lambda item: -sum(item[1]))
    busy = sum(sum(each) for each in times.values())
    return {
        "wall_s": wall / steps,
        "busy_s": busy / steps,
        "idle_s": (wall - busy) / steps,
        "launches": sum(len(each) for each in times.values()) / steps,
        "largest_gaps": [
            {"seconds": gap, "after": before, "before": after} for gap, before, after in gaps[:8]
        ],
        "kernels": [
            {
                "kernel": name[:90],
                "seconds": sum(each) / steps,
                "calls": len(each) / steps,
                "share": sum(each) / busy,
            }
            for name, each in largest[:most]
        ],
    }


def show(title: str, found: dict[str, Any], most: int = 14) -> None:
    print(
        f"  {title}: {found['launches']:.0f} launches, busy {found['busy_s'] * 1e3:.2f} of "
        f"{found['wall_s'] * 1e3:.2f} ms under the profiler"
    )
    for gap in found["largest_gaps"][:4]:
        print(
            f"    {gap['seconds'] * 1e3:8.3f} ms idle  {gap['after'][:34]} .. {gap['before'][:34]}"
        )
    for row in found["kernels"][:most]:
        print(
            f"    {row['seconds'] * 1e3:8.3f} ms {row['share']:4.0%} {row['calls']:6.0f} calls  "
            f"{row['kernel'][:70]}"
        )
