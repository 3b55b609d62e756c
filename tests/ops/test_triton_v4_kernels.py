"""DeepSeek-V4's Triton kernels in the interpreter: logic and borders, on numbers it rounds right.

The interpreter loses the carry when it rounds to e4m3, so what is rounded lies on that grid, or is
only compared between forms that round alike. Tensor instructions are for the card (``-m gpu``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CHILD = Path(__file__).with_name("triton_v4_child.py")
RUNS = (
    "stream", "stream-splits", "chunk", "quantise", "quantise-nan", "plan", "sorted-plan",
    "sorted-bounds", "combine",
    "experts-hidden", "experts-forms", "experts-rounded", "prepare", "attention",
    "attention-splits", "attention-sliced", "decoded-pages", "decoded-attention",
    "scaled-attention", "e4m3", "quantise-wide", "linear-wide", "experts-wide",
)  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> dict[str, float]:
    """One child for all: ``TRITON_INTERPRET`` binds at import."""
    done = subprocess.run(
        [sys.executable, str(CHILD), *RUNS], capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["error"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_kernel_agrees(run: str, answers: dict[str, float]) -> None:
    assert answers[run] < 2e-6


def test_keys_are_cut_into_as_many_parts_as_one_wave_holds() -> None:
    from metainfer.ops.attn_sparse.tiles import MAX_SPLITS, splits_for

    assert splits_for(32, 10, 132) == 4  # five would be 160 programs
    assert splits_for(1, 10, 132) == 16  # each tile its own
    for programs in (1, 3, 8, 66, 67, 132, 8192):
        for tiles in (1, 2, 6, 18, 400):
            parts = splits_for(programs, tiles, 132)
            assert parts == 1 or (programs * parts <= 132 and parts < 2 * tiles)
            more = 2 * parts
            assert programs * more > 132 or more > MAX_SPLITS or parts >= tiles


def test_shared_memory_of_the_tables_fits_its_cards() -> None:
    from metainfer.ops.attn_sparse.tiles import tile_for
    from metainfer.ops.linear import tiles as linear
    from metainfer.ops.moe_experts import tiles as experts

    for card, limit in (((9, 0), 232_448), ((8, 9), 101_376), ((12, 0), 101_376)):
        for rows in (16, linear.STREAM_ROWS):
            assert linear.stream_for(card, rows).shared_bytes(rows) <= limit
            assert linear.stream_for(card, rows).shared_bytes(rows, wide=True) <= limit
        assert linear.chunk_for(card).shared_bytes() <= limit
        assert linear.chunk_for(card, wide=True).wide_bytes(card) <= limit
        for wide in (False, True):
            assert experts.stream_for(card, wide).shared_bytes(wide) <= limit
            assert experts.chunk_for(card, wide).shared_bytes(wide) <= limit
        for scaled in (False, True):
            assert tile_for(card, scaled).shared_bytes(512, 2, card, scaled) <= limit


def test_estimates_are_upper_bounds_of_what_compilers_used() -> None:
    from metainfer.kernels.audit import TARGETS, load_manifest
    from metainfer.ops.attn_sparse.tiles import FEW, FEW_SCALED, HOPPER, tile_for
    from metainfer.ops.linear import tiles as linear
    from metainfer.ops.moe_experts import tiles as experts

    checked = 0
    for build in load_manifest():
        if build.shared_bytes is None:
            continue
        card, name = TARGETS[build.target][0], build.kernel
        if name.startswith("linear-fp8-stream"):
            rows = int(name.rsplit("-", 1)[1])
            estimate = linear.stream_for(card, rows).shared_bytes(rows)
        elif name.startswith("linear-fp8-chunk"):
            estimate = linear.chunk_for(card).shared_bytes()
        elif name.startswith("linear-bf16-stream"):
            rows = int(name.rsplit("-", 1)[1])
            estimate = linear.stream_for(card, rows).shared_bytes(rows, wide=True)
        elif name.startswith("linear-bf16-chunk"):
            estimate = linear.chunk_for(card, wide=True).wide_bytes(card)
        elif name.startswith("experts-bf16-stream"):
            estimate = experts.stream_for(card, wide=True).shared_bytes(wide=True)
        elif name.startswith("experts-bf16-chunk"):
            estimate = experts.chunk_for(card, wide=True).shared_bytes(wide=True)
        elif name.startswith("experts-wgmma-some"):
            estimate = experts.WGMMA_SOME.shared_bytes()
        elif name.startswith("experts-wgmma-middle"):
            estimate = experts.WGMMA_MIDDLE.shared_bytes()
        elif name.startswith("experts-wgmma-many"):
            estimate = experts.WGMMA_MANY.shared_bytes()
        elif name.startswith("experts-wgmma"):
            wgmma = experts.WGMMA_STREAM if "stream" in name else experts.WGMMA_CHUNK
            estimate = wgmma.shared_bytes()
        elif name.startswith("experts-portable"):
            stream = "stream" in name
            estimate = (
                experts.PORTABLE_STREAM if stream else experts.PORTABLE_CHUNK
            ).shared_bytes()
        elif name.startswith("experts-stream"):
            estimate = experts.stream_for(card).shared_bytes()
        elif name.startswith("experts-chunk"):
            estimate = experts.chunk_for(card).shared_bytes()
        elif name.startswith("sparse-wgmma"):
            estimate = HOPPER.shared_bytes(512, 2)
        elif name.startswith("sparse-few"):
            scaled = "fp8" in name
            few = FEW_SCALED if scaled else FEW
            estimate = few.shared_bytes(512, 2, card, scaled)
        elif name.startswith(("sparse-sm", "sparse-sliced", "sparse-fp8-sm")):
            scaled = "fp8" in name
            estimate = tile_for(card, scaled).shared_bytes(512, 2, card, scaled)
        else:
            continue
        assert build.shared_bytes <= estimate, (name, build.target, build.shared_bytes, estimate)
        checked += 1
    assert checked > 40
