"""Most bytes that torch's allocator had in use while something ran, beyond what it had before.

On a GPU the allocator keeps the peak itself. On a CPU every allocation and release is counted by
torch's profiler; what kernels take outside of torch (oneDNN's scratch) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

_MEMORY = "[memory]"


def peaks(device: torch.device, runs: Iterable[Callable[[], None]]) -> list[int]:
    """The peak of each run in bytes; `runs` may stop when it likes."""
    if device.type == "cuda":
        return [_cuda_peak(device, run) for run in runs]
    return _counted(runs)


def _cuda_peak(device: torch.device, run: Callable[[], None]) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _counted(runs: Iterable[Callable[[], None]]) -> list[int]:
    from torch.profiler import ProfilerActivity, profile, record_function

    count = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for run in runs:
            with record_function(f"{__name__}.{count}"):
                run()
            count += 1
    marks = {f"{__name__}.{number}": number for number in range(count)}
    steps: list[tuple[int, int]] = []
    spans: dict[int, tuple[int, int]] = {}
    for event in profiler.profiler.kineto_results.events():
        if event.name() == _MEMORY:
            steps.append((event.start_ns(), event.nbytes()))
        elif event.name() in marks:
            begin = event.start_ns()
            spans[marks[event.name()]] = (begin, begin + event.duration_ns())
    steps.sort(key=lambda step: step[0])
    return [_highest(steps, *spans[number]) for number in range(count)]


def _highest(steps: Iterable[tuple[int, int]], begin: int, end: int) -> int:
    """Of the running sum of (time, bytes) within a span."""
    held = most = 0
    for at, size in steps:
        if begin <= at <= end:
            held += size
            most = max(most, held)
    return most
