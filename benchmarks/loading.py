"""Loading speed of a checkpoint against its disk's own sequential rate, in one run.

    python benchmarks/loading.py FOLDER [--repeat N] [--threads N]

FOLDER: an official checkpoint, such as one that ``metainfer convert random:... FOLDER --to
official`` wrote. Each turn drops the files from the page cache, reads them from end to end in
8 MiB blocks (the disk's rate), drops them again and loads them as the CPU executor does, matrices
packed as the checkpoint stores them. A turn whose disk rate exceeds 4 GB/s was read from memory and
is said to be so: files of a container's layered or remote disk may not leave a cache.

On cores that others use too, torch's threads wait for each other: take one (`--threads 1`).

Target, written before the first run: loading at 70 % of the disk's rate.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from metainfer.executor.loading import load_weights, tensor_source
from metainfer.ops.catalog import builtin_registry
from metainfer.planner.opening import open_model

BLOCK = 8 << 20
LAYOUTS = {"weight": "stored@1", "experts": "experts-stored@1"}
CACHED = 4e9


def forget(files: Sequence[Path]) -> None:
    """Ask the kernel to drop the files' pages."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def read_through(files: Sequence[Path]) -> float:
    """Bytes per second of plain sequential reads."""
    buffer = bytearray(BLOCK)
    done, began = 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                done += count
    return done / (time.perf_counter() - began)


def load(folder: str) -> float:
    """Bytes per second from headers to packed weights."""
    registry = builtin_registry()
    layouts = {role: registry.layout(name) for role, name in LAYOUTS.items()}
    began = time.perf_counter()
    model = open_model(folder)
    source = tensor_source(model, torch.device("cpu"))
    load_weights(model.arch, source, layouts, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert model.index is not None
    return model.index.nbytes / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    wish = parser.parse_args()
    torch.set_num_threads(wish.threads)
    files = sorted(Path(wish.folder).glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    print(
        f"{wish.folder}: {size / 1e9:.2f} GB in {len(files)} files, {wish.threads} threads, "
        f"{os.cpu_count()} cores with a load of {os.getloadavg()[0]:.1f}"
    )
    disks, loads = [], []
    for _ in range(wish.repeat):
        forget(files)
        disks.append(read_through(files))
        forget(files)
        loads.append(load(wish.folder))
        cached = " (from memory, not the disk)" if disks[-1] > CACHED else ""
        print(f"disk {disks[-1] / 1e6:7.0f} MB/s{cached}   loading {loads[-1] / 1e6:7.0f} MB/s")
    disk, loading = statistics.median(disks), statistics.median(loads)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"median: disk {disk / 1e6:.0f} MB/s, loading {loading / 1e6:.0f} MB/s, "
        f"{loading / disk:.0%}; peak resident {peak / 1e9:.1f} GB"
    )


if __name__ == "__main__":
    main()
