"""How fast this host reads memory and multiplies: a short measurement, kept as a record.

The cost model ranks kernels by these two numbers, and a layout by the first. Reading: the maximum
of 64 MiB of float32, one thread or one per usable core, whichever is faster. Multiplying: float32
``[512, 512] x [512, 512]`` by the BLAS of numpy. Best of at least five. Both are lower bounds of
what a kernel can reach. Takes 0.1 to 0.3 s, mostly the first touch of the memory; the record makes
that once per machine. Without a record and without permission to measure, a seed that says so.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from metainfer.core.records import Record, RecordStore
from metainfer.platform.capability import FLOAT32
from metainfer.platform.facts import CPU, Facts
from metainfer.platform.origins import MEASURED, SEED, origin

KIND = "host-speed"
KEY = "read-and-multiply"
READ_BYTES = 64 << 20
SIDE = 512
REPEATS = 5
WINDOW_S = 0.02
SEED_READ_BYTES_S = 1.5e10
SEED_FLOPS_PER_CORE = 5e10


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """Bytes per second read, float32 FLOP per second, and the origin of both."""

    read_bytes_s: float
    float32_flops: float
    origin: str


def host_speed(facts: Facts, store: RecordStore | None, *, measure: bool = True) -> HostSpeed:
    """The record of this machine, else a new measurement (kept when there is a store), else seed.

    Raises:
        UserError: the record file is damaged.
    """
    record = store.get(KIND, KEY) if store is not None else None
    if record is not None and isinstance(record.payload, Mapping):
        payload = record.payload
        return HostSpeed(
            float(payload["read_bytes_s"]),
            float(payload["float32_flops"]),
            origin(MEASURED, "this machine's record"),
        )
    cores = facts.host.usable_cores or 1
    busy = os.getloadavg()[0] > cores
    if busy or not measure:
        # A rate taken beside other work would rank kernels wrongly; the seed at least is steady.
        why = "the machine is busy" if busy else "not measured on this machine"
        text = origin(SEED, why)
        return HostSpeed(SEED_READ_BYTES_S, SEED_FLOPS_PER_CORE * cores, text)
    speed = measure_host(cores)
    if store is not None:
        payload = {"read_bytes_s": speed.read_bytes_s, "float32_flops": speed.float32_flops}
        conditions: dict[str, object] = {
            "read_bytes": READ_BYTES,
            "side": SIDE,
            "repeats": REPEATS,
            "threads": cores,
            "load_1min": os.getloadavg()[0],
        }
        store.put(Record(KIND, KEY, payload, conditions))
    return speed


def measure_host(cores: int) -> HostSpeed:
    """Measure now, on up to `cores` threads."""
    import numpy as np

    data = np.ones(READ_BYTES // 4, np.float32)
    parts = np.array_split(data, max(1, cores))
    single = _best(lambda: data.max())
    with ThreadPoolExecutor(len(parts)) as pool:
        together = _best(lambda: list(pool.map(np.max, parts)))
    square = np.ones((SIDE, SIDE), np.float32)
    multiply = _best(lambda: square @ square)
    return HostSpeed(
        READ_BYTES / min(single, together),
        2.0 * SIDE**3 / multiply,
        origin(MEASURED, f"now, best of {REPEATS} or more"),
    )


def with_host_speed(facts: Facts, speed: HostSpeed) -> Facts:
    """The facts with the speed filled in where it was unknown, for host and CPU devices. Pure."""
    origins = dict(facts.origins)
    host = facts.host
    if host.read_bytes_s is None:
        host = dataclasses.replace(host, read_bytes_s=speed.read_bytes_s)
        origins["host.read_bytes_s"] = speed.origin
    devices = list(facts.devices)
    for index, device in enumerate(devices):
        if device.kind != CPU:
            continue
        if device.read_bytes_s is None:
            device = dataclasses.replace(device, read_bytes_s=speed.read_bytes_s)
            origins[f"devices.{index}.read_bytes_s"] = speed.origin
        if FLOAT32 not in device.dot_flops:
            rates = {**device.dot_flops, FLOAT32: speed.float32_flops}
            device = dataclasses.replace(device, dot_flops=rates)
            origins[f"devices.{index}.dot_flops.{FLOAT32}"] = speed.origin
        devices[index] = device
    return dataclasses.replace(facts, host=host, devices=tuple(devices), origins=origins)


def _best(call: Callable[[], object]) -> float:
    """Least seconds of one call over at least `REPEATS` calls and `WINDOW_S` seconds."""
    seconds: list[float] = []
    end = time.perf_counter() + WINDOW_S
    while len(seconds) < REPEATS or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
