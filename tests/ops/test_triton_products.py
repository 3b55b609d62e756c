"""FP8 products in Triton's interpreter: parts of K, many tokens, groups of heads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from metainfer.kernels.audit import TARGETS, load_manifest
from metainfer.ops.linear.tiles import chunk_for, chunk_splits, stream_for, stream_splits
from metainfer.ops.out_group.tiles import BLOCK, FEW_ROWS, splits_for, tile_for

CHILD = Path(__file__).with_name("products_child.py")
RUNS = ("chunk-parts", "quantise-many", "grouped")
CARDS = {(8, 0): 166_912, (8, 9): 101_376, (9, 0): 232_448, (12, 0): 101_376}
ROWS = (1, 16, 17, 32, 33, 64, 65, 128)


@pytest.fixture(scope="module")
def answers() -> dict[str, float]:
    done = subprocess.run([sys.executable, str(CHILD)], capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["error"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_product_agrees(run: str, answers: dict[str, float]) -> None:
    assert answers[run] < 2e-6


def test_k_is_cut_into_equal_parts_until_the_card_is_full() -> None:
    assert stream_splits(256, 1024, 132) == 1  # enough tiles
    assert stream_splits(32, 8192, 132) == 8
    assert stream_splits(12, 4096, 132) == 16  # no part under two blocks
    assert chunk_splits(24, 4096, 132) == 4 and chunk_splits(64, 2048, 132) == 2
    assert chunk_splits(24, 1024, 132) == 1  # none under eight
    for splits, least in ((stream_splits, 2), (chunk_splits, 8)):
        for tiles in (1, 12, 32, 64, 300):
            for k in (128, 256, 384, 1536, 4096, 8192):
                parts = splits(tiles, k, 132)
                assert (k // 128) % parts == 0 and (parts == 1 or k // 128 // parts >= least)
                assert parts == 1 or tiles * parts <= 2 * 132


def test_few_tokens_take_small_tiles_that_fit_their_cards() -> None:
    for card, limit in CARDS.items():
        for rows in (33, 128, 129):
            assert chunk_for(card, rows=rows).shared_bytes() <= limit
            assert chunk_for(card, wide=True, rows=rows).wide_bytes(card) <= limit
        assert stream_for(card, 32, 6 << 20).shared_bytes(32) <= limit
    assert chunk_for((9, 0), rows=128).n < chunk_for((9, 0), rows=129).n
    assert stream_for((9, 0), 32, 6 << 20).n < stream_for((9, 0), 32, 32 << 20).n
    assert stream_for((9, 0), 1, 6 << 20).early > stream_for((9, 0), 1, 32 << 20).early > 0
    assert not any(stream_for((9, 0), 32, size << 20).early for size in (6, 32))


def test_grouped_tiles_fit_their_cards_and_cut_k_evenly() -> None:
    for card, limit in CARDS.items():
        for rows in ROWS:
            tile = tile_for(card, rows)
            assert rows <= tile.m and tile.shared_bytes() <= limit and BLOCK % tile.n == 0
            for n, k, units in ((8192, 4096, 132), (1024, 4096, 188), (128, 128, 84)):
                parts = splits_for(tile, n, k, units)
                assert k // BLOCK % parts == 0 and (parts == 1 or k // BLOCK // parts >= 4)
                assert parts == 1 or n // tile.n * parts <= tile.each * units
    assert splits_for(tile_for((9, 0), 1), 8192, 4096, 132) == 4
    assert tile_for(None, FEW_ROWS).m == FEW_ROWS


def test_grouped_estimates_are_upper_bounds_of_what_compilers_used() -> None:
    checked = 0
    for build in load_manifest():
        rows = build.kernel.removeprefix("out-group-").split("-")[0]
        if build.kernel.startswith("out-group-") and rows.isdigit() and build.ok:
            tile = tile_for(TARGETS[build.target][0], int(rows))
            assert build.shared_bytes is not None
            assert build.shared_bytes <= tile.shared_bytes(), build.kernel
            checked += 1
    assert checked >= 16
