"""Triton kernels against the references, in Triton's interpreter on the host.

Only float32 and float16: the interpreter is silently wrong for bfloat16 (see the last test, which
fails on the day that this ends). bfloat16 is judged on a card (``-m gpu``, first start).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CHILD = Path(__file__).with_name("interpret_child.py")
#: Attention is slow here: each of its kernels runs in one of the two types.
SMALL = ("swiglu", "embed", "kv_write", "rmsnorm", "add_rmsnorm", "rope")
RUNS = [f"{op}/triton:{dtype}" for op in SMALL for dtype in ("float16", "float32")] + [
    "attn_paged/triton:float16",
    "attn_paged/triton-split:float32",
    "attn_paged_part/triton:float16",
    "attn_weigh/triton:float32",
    "out_group/triton:float16",
]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    """One child for all: importing takes longer than most cases."""
    done = subprocess.run(
        [sys.executable, str(CHILD), "7", *RUNS], capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["reasons"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_kernel_passes_its_cases(run: str, answers: dict[str, list[str]]) -> None:
    assert answers[run] == []


_BF16 = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl
@triton.jit
def cast(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))
x = torch.randn(256, generator=torch.Generator().manual_seed(0))
y = torch.empty(256, dtype=torch.bfloat16)
cast[(1,)](x, y, 256)
print(int((y != x.bfloat16()).sum()))
"""


def test_interpreter_is_still_wrong_for_bfloat16() -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=_BF16, capture_output=True, text=True, timeout=540
    )
    if done.returncode:
        pytest.skip(f"the interpreter refuses bfloat16: {done.stderr.splitlines()[-1]}")
    assert int(done.stdout) > 0, "the interpreter rounds to bfloat16 now: test in it too"


def test_split_count_follows_shapes() -> None:
    from metainfer.ops.attn_paged.tiles import MAX_SPLITS, splits_for

    assert splits_for(8, 512, 132) == 64  # one sequence, 8 cache heads, long table
    assert splits_for(512, 64, 132) == 1  # enough programs without cutting
    assert splits_for(1, 10_000, 132) == MAX_SPLITS
    assert splits_for(1, 3, 132) == 1  # two key tiles or more each
    for programs in range(1, 300, 7):
        for tiles in (1, 2, 5, 64, 1000):
            splits = splits_for(programs, tiles, 132)
            assert splits & (splits - 1) == 0 and 1 <= splits <= MAX_SPLITS
            assert splits == 1 or tiles // splits >= 2
