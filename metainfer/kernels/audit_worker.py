"""Child of the compile audit: reads jobs as JSON lines, answers each with a JSON line.

Runs in a process of its own because a compiler fed illegal code may take the process along, and
because ``TRITON_INTERPRET`` binds at import. Which Triton is found follows from ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from metainfer.kernels import audit_cuda

_DOT = re.compile(r"tt\.dot .*: tensor<\d+x(\d+)x\w+, #ttg\.dot_op<\{[^}]*kWidth = (\d+)")
_MMA = re.compile(r"\b((?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*)")


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = build(job)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the answer
            text = [part for part in str(error).strip().splitlines() if part.strip()] or [""]
            answer = {"ok": False, "error": f"{type(error).__name__}: {text[-1][:300]}"}
        print(json.dumps(answer), flush=True)


def build(job: dict[str, Any]) -> dict[str, Any]:
    """Compile one variant for one target and read what the tools say about it."""
    if "function" in job:
        return audit_cuda.build(job)
    import triton
    from triton.backends.compiler import GPUTarget

    module, _, name = job["kernel"].partition(":")
    kernel = getattr(importlib.import_module(module), name)
    signature, constants, attributes = {}, {}, {}
    for place, (argument, kind) in enumerate(job["args"]):
        if isinstance(kind, str) and kind.startswith("type:"):
            signature[argument] = "constexpr"
            constants[(place,)] = getattr(triton.language, kind.removeprefix("type:"))
        elif isinstance(kind, str):
            signature[argument], _, multiple = kind.partition(":")
            if multiple or kind.startswith("*"):
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "constexpr"
            constants[(place,)] = kind
    source = _source(kernel)(kernel, signature, constants, attributes)
    started = time.perf_counter()
    built = triton.compile(
        source,
        target=GPUTarget("cuda", job["arch"], 32),
        options={"num_warps": job["warps"], "num_stages": job["stages"]},
    )
    seconds = time.perf_counter() - started
    ptx = built.asm["ptx"]
    spill, serial, assembler = assemble(ptx)
    return {
        "ok": True,
        "shared_bytes": built.metadata.shared,
        "registers": registers(built.asm["cubin"]),
        "spill_bytes": spill,
        "serial": serial,
        "repeated": repeated(built.asm["ttgir"]),
        "mma": sorted(set(_MMA.findall(ptx))),
        "compiler": f"triton {triton.__version__}, ptxas {assembler}",
        "seconds": round(seconds, 3),
    }


def repeated(ttgir: str) -> str:
    """Products of `mma.sync` whose operand is stored in more channels for each thread than there
    are: Triton up to 3.7, at least (triton-lang/triton#11691), multiplies some twice and others
    not at all where four times a thread's share is more than there is. ``""``: none."""
    for depth, each in _DOT.findall(ttgir):
        if int(depth) < 4 * int(each):
            return f"{each} channels a thread of {depth}"
    return ""


def _source(kernel: Any) -> Any:
    """The class that reads `kernel`: Triton's language, or Gluon's with its layouts written out."""
    if "gluon" in type(kernel).__module__:
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def registers(cubin: bytes) -> int | None:
    """Registers per thread, from ``cuobjdump -res-usage``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True
        )
    found = re.search(r"REG:(\d+)", done.stdout)
    return int(found.group(1)) if found else None


def assemble(ptx: str) -> tuple[int | None, str, str]:
    """From ``ptxas -v``: spilled bytes (stores plus loads), why asynchronous matrix instructions
    are waited for one by one (``""``: they are not), the assembler's version."""
    header = re.search(r"^\.target\s+(sm_(\d+)\w*)", ptx, re.MULTILINE)
    assert header is not None
    programs = [_tool("ptxas"), _tool("ptxas-blackwell")]
    if int(header.group(2)) >= 100:
        programs.reverse()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        flags = ["-v", f"--gpu-name={header.group(1)}", str(path), "-o", folder + "/out"]
        # The older assembler does not know the newest PTX, whatever the target.
        for program in filter(os.path.exists, programs):
            done = subprocess.run([program, *flags], capture_output=True, text=True)
            said = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
            if said:
                serial = re.search(r"instructions are serialized due to (.*)", done.stderr)
                why = serial.group(1).partition(" in the function")[0] if serial else ""
                return int(said.group(1)) + int(said.group(2)), why, _version(program)
    return None, "", "unknown"


def _version(program: str) -> str:
    told = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release ([\d.]+)", told)
    return release.group(1) if release else "unknown"


if __name__ == "__main__":
    main()
