"""Communication on one or two GPUs: built, verified, then timed against bars and NCCL.

    python benchmarks/comm_gpu.py --out FOLDER [--seconds 420] [--only SECTION ...]

Writes ``comm_gpu.json``. Every section is a process of its own with a time limit, so that one that
hangs or breaks its context costs only itself. On one GPU: virtual ranks in device memory (`local`)
and in pinned host memory (`host`, all on one link), copy engines through host memory, and two
processes by IPC and by shared host memory (correctness only: they share the card by time slices).
On two: `host`, copies and `ipc` against NCCL, eager and in graphs, without and with peer access;
rows gathered and sums scattered.
Exit status 1 when a result is wrong; missed bars are reported, not hidden.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from comm_gpu_pair import one_card, pair, rows, streams
from comm_gpu_soak import soak
from comm_gpu_virtual import copies, time_epilogue, time_virtual, verify_virtual

from metainfer.comm import driver, layout, loader
from metainfer.comm.loader import Variant
from metainfer.comm.model import host_limit_us
from metainfer.kernels import cubin

KIB, MIB = 1 << 10, 1 << 20
BARS = {
    "local N=4 64K": 6.0,
    "host N=2 16K, one link": 7.0,
    "copy N=2 20M, one link": 1200.0,
    "epilogue at 8 rows": 0.5,
    "pair host 8K": 10.0,
    "pair host 256K": 20.0,
    "pair host 1M": 45.0,
    "pair copy 16M": 1.25 * host_limit_us("two_shot", 2, 16 * MIB),
    "pair copy 64M": 1.25 * host_limit_us("two_shot", 2, 64 * MIB),
}
Report = dict[str, Any]


def build() -> Report:
    """Every variant in use, cold and side by side, with what the assembler says of spills."""
    major, minor = torch.cuda.get_device_capability()
    bf16 = layout.TYPES["bfloat16"]
    wanted = [Variant(n, bf16, rows) for n in (2, 3, 4, 8) for rows in (False, True)]
    wanted += [Variant(n, layout.BYTES) for n in (2, 4, 8)]
    wanted += [Variant(4, code) for code in layout.TYPES.values() if code != bf16]

    def one(variant: Variant) -> Report:
        begin = time.monotonic()
        built, verdict, log = loader.build(variant, f"sm_{major}{minor}")
        spills = [line.strip() for line in log.splitlines() if "spill" in line][-1:]
        return {
            "variant": str(variant),
            "s": round(time.monotonic() - begin, 2),
            "failed" if built is None else "ok": verdict.to_json(),
            "spills": spills,
        }

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {"nvcc": cubin.find_nvcc(), "variants": list(pool.map(one, wanted))}


SECTIONS: dict[str, tuple[int, float]] = {
    "build": (1, 150),
    "verify_local": (1, 90),
    "verify_host": (1, 90),
    "soak": (1, 60),
    "time_local": (1, 60),
    "time_epilogue": (1, 40),
    "time_host": (1, 60),
    "copies": (1, 60),
    "one_card": (1, 120),
    "pair_without_peer": (2, 180),
    "pair_with_peer": (2, 150),
    "streams": (2, 100),
    "rows": (2, 60),
}


def section(name: str) -> Report:
    steps: dict[str, Callable[[], Report]] = {
        "build": build,
        "verify_local": lambda: verify_virtual(False),
        "verify_host": lambda: verify_virtual(True),
        "soak": soak,
        "time_local": lambda: time_virtual(False),
        "time_epilogue": time_epilogue,
        "time_host": lambda: time_virtual(True),
        "copies": copies,
        "one_card": one_card,
        "pair_without_peer": lambda: pair(False),
        "pair_with_peer": lambda: pair(True),
        "streams": streams,
        "rows": rows,
    }
    return steps[name]()


def bars(report: Report) -> Report:
    """Each bar beside what was measured, None where that section did not run."""

    def get(*path: str) -> float | None:
        found: Any = report
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return float(found) if isinstance(found, (int, float)) else None

    def least(name: str, *starts: str) -> float | None:
        rows = report.get(name, {}).get("rows", {})
        times = [row["us"] for key, row in rows.items() if key.startswith(starts)]
        return min(times, default=None)

    def epilogue() -> float | None:
        """Of each world the grid in which a sum with its epilogue is fastest; the worse world."""
        pairs = report.get("time_epilogue", {}).get("pairs", {})
        worlds = [[row for key, row in pairs.items() if key.startswith(n)] for n in ("N=2", "N=4")]
        if not all(worlds):
            return None
        return max(min(rows, key=lambda row: row["epilogue_us"])["us"] for rows in worlds)

    def host(size: int) -> float | None:
        of_pair = least("pair_without_peer", f"host one_shot {size} ", f"host two_shot {size} ")
        return of_pair or least("streams", f"host one_shot {size} graph by size")

    measured = {
        "local N=4 64K": get("time_local", "best", f"N=4 {64 * KIB}", "us"),
        "host N=2 16K, one link": get("time_host", "best", f"N=2 {16 * KIB}", "us"),
        "copy N=2 20M, one link": get("copies", "rows", str(20 * MIB), "us"),
        "epilogue at 8 rows": epilogue(),
        "pair host 8K": host(8 * KIB),
        "pair host 256K": host(256 * KIB),
        "pair host 1M": host(MIB),
        "pair copy 16M": least("streams", f"copy copy {16 * MIB} eager"),
        "pair copy 64M": least("streams", f"copy copy {64 * MIB} eager"),
    }
    return {name: {"bar": bar, "us": measured[name]} for name, bar in BARS.items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--section", help="run one section in this process")
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), help="sections to run")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.section:
        found = section(arguments.section)
        (arguments.out / f".{arguments.section}.json").write_text(json.dumps(found))
        return 0
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    end = time.monotonic() + arguments.seconds
    report: Report = {
        "device": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "driver": driver_version(),
        "command": " ".join(sys.argv),
    }
    for name in arguments.only:
        needs, limit = SECTIONS[name]
        if report["devices"] < needs:
            report[name] = {"skipped": f"needs {needs} devices"}
            continue
        left = end - time.monotonic()
        if left < 15:
            report[name] = {"skipped": "no time left"}
            continue
        report[name] = child(name, arguments.out, min(limit, left))
        print(f"{name}: {json.dumps(report[name])[:400]}", flush=True)
        save(arguments.out, report)
    report["bars"] = bars(report)
    save(arguments.out, report)
    print(json.dumps(report["bars"], indent=1))
    bad = [n for n in SECTIONS if isinstance(report.get(n), dict) and wrong_in(report[n])]
    print("WRONG in " + ", ".join(bad) if bad else "nothing wrong")
    return 1 if bad else 0


def child(name: str, out: Path, limit: float) -> Report:
    command = [sys.executable, __file__, "--section", name, "--out", str(out)]
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        tail = (error.stderr or b"")[-1500:]
        return {"failed": f"no end after {limit:.0f} s", "stderr": str(tail)}
    part = out / f".{name}.json"
    if done.returncode or not part.exists():
        return {"failed": f"status {done.returncode}", "stderr": done.stderr[-3000:]}
    found: Report = json.loads(part.read_text())
    part.unlink()
    return {**found, "section_s": round(time.monotonic() - begin, 1)}


def wrong_in(found: Report) -> bool:
    """Whether a section failed or found a wrong result."""
    if "failed" in found or found.get("wrong"):
        return True
    return any(isinstance(each, dict) and each.get("wrong") for each in found.values())


def driver_version() -> int:
    number = ctypes.c_int()
    driver.call("cuDriverGetVersion", ctypes.byref(number))
    return number.value


def save(out: Path, report: Report) -> None:
    (out / "comm_gpu.json").write_text(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:  # noqa: BLE001 - a section's words reach its parent
        traceback.print_exc()
        sys.exit(2)
