"""An error planted for the memory checker, so that a run without others proves something.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=benchmarks compute-sanitizer --tool memcheck \\
        --target-processes all --report-api-errors no --log-file LOG python -m pytest -p planted \\
        -n 6 -m gpu -k "triton and bfloat16" tests/ops/test_gpu_kernels.py
    python benchmarks/planted.py LOG --processes 6

As a plug-in of tests: each process that ran tests ends by writing one number behind a tensor,
which ends its context. The checker must have told that, once a process, and nothing else; exit
status 1 when it has not.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

_REPORT = re.compile(r"^=+ (Invalid .*)\n=+ +at (.*)", re.MULTILINE)
_SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) error", re.MULTILINE)
HELD = 1000
"""Numbers of the tensor: its bytes are no multiple of what allocators round to."""


@triton.jit
def planted_kernel(out, behind):
    tl.store(out + behind, 1)


def pytest_sessionfinish(session: Any) -> None:
    import torch

    beside = getattr(session.config.option, "numprocesses", None)
    if beside and not hasattr(session.config, "workerinput"):
        return  # the workers run the tests
    out = torch.zeros(HELD, dtype=torch.int32, device="cuda")
    planted_kernel[(1,)](out, HELD, num_warps=1)
    with contextlib.suppress(RuntimeError):  # the checker ends the context
        torch.cuda.synchronize()


def judge(log: str, processes: int) -> list[str]:
    """What `log` lacks of `processes` planted errors, and what it has beside them."""
    found = _REPORT.findall(log)
    wrong = [f"{what} at {where}" for what, where in found if "planted_kernel" not in where]
    planted, told = len(found) - len(wrong), sum(map(int, _SUMMARY.findall(log)))
    if planted != processes:
        wrong.append(f"{planted} planted errors told, {processes} processes ran tests")
    if told != len(found):
        wrong.append(f"the checker counts {told} errors, {len(found)} are read here")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("log", type=Path)
    parser.add_argument("--processes", type=int, required=True)
    args = parser.parse_args()
    wrong = judge(args.log.read_text(), args.processes)
    print(*(wrong or [f"{args.processes} planted errors told, and no other"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
