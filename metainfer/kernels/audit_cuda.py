"""A kernel in CUDA C++ for the compile audit: built by nvcc, read from what the assembler says."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from metainfer.kernels import cubin

_MMA = re.compile(r"\b(mma\.sync[\w.:]*)")
_USED = re.compile(
    r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)", re.DOTALL
)


def build(job: dict[str, Any]) -> dict[str, Any]:
    """The answer of `audit_worker.build` for a job with `file`, `defines`, `function`, `arch`, and
    the `shared` bytes that a launch asks for.

    Raises:
        RuntimeError: there is no nvcc, or it fails; the last line says why.
    """
    nvcc = cubin.find_nvcc()
    if nvcc is None:
        raise RuntimeError("CUDA sources are audited with nvcc, which was not found")
    name, arch, started = job["function"], f"-arch={job['arch']}", time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="metainfer-audit-") as folder:
        ptx, out = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        _run([nvcc, "-ptx", arch, *cubin.FLAGS, *job["defines"], job["file"], "-o", str(ptx)])
        said = _run([nvcc, "-cubin", arch, "-Xptxas", "-v", str(ptx), "-o", str(out)])
        text = ptx.read_text()
    found = _USED.search(said.partition(f"'{name}'")[2])
    assert found is not None, said
    stores, loads, registers, more = found.groups()
    fixed = re.search(r"(\d+) bytes smem", more)
    body = text.partition(f".entry {name}(")[2].partition(".entry ")[0]
    return {
        "ok": True,
        "shared_bytes": job["shared"] + (int(fixed.group(1)) if fixed else 0),
        "registers": int(registers),
        "spill_bytes": int(stores) + int(loads),
        "mma": sorted(set(_MMA.findall(body))),
        "compiler": f"nvcc {_release(nvcc)}",
        "seconds": round(time.perf_counter() - started, 3),
    }


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=cubin.TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"nvcc ended with {done.returncode}")
    return done.stderr + done.stdout


def _release(nvcc: str) -> str:
    found = re.search(r"release ([\d.]+)", _run([nvcc, "--version"]))
    return found.group(1) if found else "unknown"
