"""Triton kernels of DeepSeek-V4's streams, latents, compressors and activation, in the interpreter.

Float32 and float16 only: the interpreter is wrong for bfloat16. Entries are rounded by integer
arithmetic, so their bytes are compared with the reference's bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
#: Each kernel once, in one of the two types; ``KERNEL_CASES=all`` runs the other forms too.
CASES: tuple[str, ...] = (
    "hyper_mix_pre/triton:float16", "hyper_mix/triton:float16", "hyper_head/triton:float16",
    "swiglu_clamp/triton:float16", "latent_qkv/triton:float16", "latent_qkv/triton-fp8:float32",
    "compress/triton-fp8:float32", "compress_index/triton-fp4:float32",
)  # fmt: skip
if os.environ.get("KERNEL_CASES") == "all":
    CASES += (
        "hyper_pre/triton:float16", "hyper_mix_pre/triton:float32", "latent_qkv/triton:float32",
        "compress/triton:float16", "compress_index/triton:float16",
        "compress_index/triton-fp8:float16",
    )  # fmt: skip
RUNS = (
    "latent-fp8-bytes", "index-fp8-bytes", "index-fp4-bytes", "codes", "hadamard", "compress-cuts",
    "hyper-parts", "hyper-long",
)  # fmt: skip


def child(script: str, *arguments: str) -> list[dict[str, object]]:
    """``TRITON_INTERPRET`` binds at import, so each script has a process for all of its runs."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def reasons() -> dict[object, object]:
    return {a["name"]: a["reasons"] for a in child("interpret_child.py", "5", *CASES)}


@pytest.fixture(scope="module")
def errors() -> dict[object, object]:
    return {a["name"]: a["error"] for a in child("triton_blocks_child.py", *RUNS)}


@pytest.mark.slow
@pytest.mark.parametrize("run", CASES)
def test_kernel_passes_its_cases(run: str, reasons: dict[object, object]) -> None:
    assert reasons[run] == []


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_kernel_agrees(run: str, errors: dict[object, float]) -> None:
    assert errors[run] < 2e-6


def test_streams_pass_through_no_shared_memory() -> None:
    from metainfer.kernels.audit import load_manifest

    checked = 0
    for build in load_manifest():
        if build.impl.startswith("hyper_") and build.mma:
            assert build.shared_bytes == 0, (build.kernel, build.target)
            checked += 1
    assert checked >= 3 * 3 * 4 * 2


def test_channels_are_cut_into_powers_of_two_parts() -> None:
    from metainfer.ops.hyper.tiles import LONG, MIDDLE, SHORT, splits_for, tile_for

    assert splits_for(SHORT, 1, 128, 132) == 128  # one token reads with the whole card
    assert splits_for(MIDDLE, 2, 512, 132) == 128
    assert splits_for(MIDDLE, 8, 512, 132) == 64
    assert splits_for(LONG, 128, 512, 132) == 8
    for rows in (1, 64, 65, 1023, 1024, 8192):
        tile = tile_for(rows)
        for chunks in (1, 2, 3, 5, 128):
            splits = splits_for(tile, -(-rows // tile.m), chunks, 132)
            assert splits & (splits - 1) == 0 and 1 <= splits <= min(tile.splits, max(chunks, 1))


def test_slices_of_a_window_are_dealt_whole() -> None:
    """Tiles do not follow the number of tokens: sums would round otherwise in a longer step."""
    from metainfer.ops.compress.tiles import each_for, tile_for

    assert tile_for(8, 512).slice == 512 and tile_for(128, 512).slice < 512
    for slices in (1, 2, 32, 64):
        for rows in (1, 31, 32, 33, 128, 8192):
            each = each_for(rows, slices)
            assert slices % each == 0
            assert rows * slices // each <= max(1024, 2 * rows)
    assert each_for(32, 32) == 1 and each_for(128, 32) == 4
