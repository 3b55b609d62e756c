"""The memory checker's log: one planted error a process, and no other."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("triton")

_SPEC = importlib.util.spec_from_file_location(
    "planted", Path(__file__).parents[2] / "benchmarks" / "planted.py"
)
assert _SPEC is not None and _SPEC.loader is not None
planted = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(planted)


def report(kernel: str) -> str:
    return (
        "========= Invalid __global__ write of size 4 bytes\n"
        f"=========     at {kernel}+0x90 in kernels.py:28\n"
        "=========     by thread (0,0,0) in block (0,0,0)\n"
    )


def log(*kernels: str, told: int | None = None) -> str:
    count = len(kernels) if told is None else told
    body = "".join(map(report, kernels))
    return f"========= COMPUTE-SANITIZER\n{body}========= ERROR SUMMARY: {count} errors\n"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (log("planted_kernel", "planted_kernel"), ""),
        (log("planted_kernel"), "1 planted errors told, 2 processes"),  # one was not watched
        (log(), "0 planted errors told"),
        (log("planted_kernel", "sort_kernel", "planted_kernel"), "at sort_kernel"),
        (log("planted_kernel", "planted_kernel", told=3), "counts 3 errors, 2 are read"),
    ],
)
def test_the_log_is_judged(text: str, word: str) -> None:
    wrong = planted.judge(text, 2)
    assert [bool(word)] == [bool(wrong)] and word in " ".join(wrong)


def test_two_summaries_are_added() -> None:
    assert planted.judge(log("planted_kernel") + log("planted_kernel"), 2) == []
