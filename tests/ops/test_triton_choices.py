"""Triton kernels that choose (entries, experts, tokens) in the interpreter: to the last number.

A choice is judged by equality, ties included, so scores are exact here. Tensor instructions and
bfloat16 are for the card (``-m gpu``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
CASES = (
    "index_query/triton:float16",
    "index_query/triton-fp8:float32",
    "index_query/triton-fp4:float32",
    "index_select/triton:float16",
    "moe_route/triton:float16",
    "moe_route_hash/triton:float32",
    "sample/triton:float32",
)
RUNS = (
    "queries", "lengths", "widths", "ties", "special", "forms", "search", "channels", "sequences",
    "rows", "unseen", "cuts", "route-scores", "route-special", "route-parts", "sample-borders",
    "sample-parts", "sample-bins",
)  # fmt: skip


def child(name: str, *arguments: str) -> list[dict[str, object]]:
    """One process for all runs: ``TRITON_INTERPRET`` binds at import."""
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def reasons() -> dict[object, object]:
    return {line["name"]: line["reasons"] for line in child("interpret_child.py", "7", *CASES)}


@pytest.fixture(scope="module")
def wrong() -> dict[object, object]:
    return {line["name"]: line["wrong"] for line in child("choice_child.py", *RUNS)}


@pytest.mark.slow
@pytest.mark.parametrize("run", CASES)
def test_kernel_passes_its_cases(run: str, reasons: dict[object, object]) -> None:
    assert reasons[run] == []


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_kernel_chooses_as_the_reference(run: str, wrong: dict[object, object]) -> None:
    assert wrong[run] == 0


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [65_536, 1 << 20])
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("rows", [1024, 4096, 16384])
def test_b19_scores_stay_under_their_bound(rows: int, ratio: int, context: int) -> None:
    """What a call holds is at most the bound (or one row), and every row is served once."""
    from metainfer.ops.indexer.tiles import WORKSPACE, row_bytes, rows_at_once

    for top_k in (512, 1024, 2048):
        capacity = context // ratio
        many = rows_at_once(rows, capacity, top_k)
        assert many == 1 or many * row_bytes(capacity, top_k) <= WORKSPACE
        assert 1 <= many <= rows
        assert many == rows or (many + 1) * row_bytes(capacity, top_k) > WORKSPACE
        served = [
            r for first in range(0, rows, many) for r in range(first, min(first + many, rows))
        ]
        assert served == list(range(rows))


def test_estimates_are_upper_bounds_of_what_compilers_used() -> None:
    from metainfer.kernels.audit import TARGETS, load_manifest
    from metainfer.ops.indexer import tiles as indexer
    from metainfer.ops.moe_route import tiles as route

    checked = 0
    for build in load_manifest():
        if build.shared_bytes is None:
            continue
        kind, _, last = build.kernel.rpartition("-")
        if kind.startswith("index-score"):
            tile = indexer.STREAM if "one" in kind else indexer.SCORE
            tile = indexer.WIDE_SCORE if "wide" in kind else tile
            heads, _, channels = last.partition("x")
            d = max(int(channels or 128), indexer.HALF_BYTE_CHANNELS)
            estimate = tile.shared_bytes(int(heads), d, 2)
        elif kind.startswith("moe-route"):
            score, _, gate = kind.removeprefix("moe-route-").removeprefix("score-").partition("-")
            width = {"bf16": 2, "fp32": 4}.get(gate.removesuffix("-early"))
            if width is None:
                continue  # the choice holds a warp's exchange
            estimate = route.TILES[score].shared_bytes(2, width)
        else:
            continue
        assert build.shared_bytes <= estimate <= TARGETS[build.target][1], build.kernel
        checked += 1
    assert checked >= 40


def test_cuts_follow_shapes() -> None:
    """A captured step has one grid for every length: nothing but sizes goes in."""
    from metainfer.ops.indexer.tiles import query_block, select_lanes, splits_for
    from metainfer.ops.moe_route.tiles import FEW, MANY, SOME, WHOLE
    from metainfer.ops.moe_route.tiles import tile_for as routing

    assert splits_for(1, 2048, 132) == 512 and splits_for(1, 4, 132) == 4
    assert splits_for(512, 2048, 132) == 2 and splits_for(10_000, 2048, 132) == 1
    assert splits_for(32, 32, 132) == 16
    assert query_block(1, 1, 64, 132) == 1 and query_block(30, 6, 64, 132) == 5
    assert query_block(2048, 1, 8, 132) == 16 and query_block(480, 1, 128, 132) == 64
    assert query_block(4096, 128, 1024, 132) == 32
    assert select_lanes(2048, 512) == 2048 and select_lanes(3000, 512) == 4096
    assert select_lanes(262144, 512) == 8192 and select_lanes(262144, 2048) == 16384
    sizes = (1, 32, 33, 256, 257, 4096, 4097)
    assert [routing(rows) for rows in sizes] == [FEW, FEW, SOME, SOME, MANY, MANY, WHOLE]
    for tile in (FEW, SOME, MANY, WHOLE):  # every channel is some part's, whatever the gate's type
        for width in (2, 4):
            for k in (1, 33, 4096, 5120):
                steps = -(-k // tile.step(width))
                assert tile.share(k, width) * tile.splits >= steps


def test_b30_warm_up_meets_every_form_of_routing_and_sorting() -> None:
    """Sizes at which another kernel is compiled lie on both sides of one that warm-up runs."""
    from metainfer.executor.warmup import SIZES
    from metainfer.ops.moe_experts.sorting import plan_of
    from metainfer.ops.moe_route.tiles import tile_for as routing

    warmed, met = (1, 16, *SIZES, 8192), range(1, 8193)
    for card in (None, (8, 9), (9, 0), (12, 0)):
        assert {routing(rows, card) for rows in warmed} == {routing(rows, card) for rows in met}
        assert routing(1, card).early is (card in ((9, 0), (12, 0)))
    assert {plan_of(rows * 6) for rows in warmed} == {plan_of(rows * 6) for rows in met}
