"""Tiles that must fit shared memory, sizes that must fit an instantiation."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metainfer.kernels.tiles import MIN_K, GemmTile, clamp_tile, pad_to_instantiation

LIMITS = (101_376, 166_912, 232_448)
TILES = [
    GemmTile(m, n, k, stages)
    for m, n, k, stages in itertools.product(
        (16, 64, 128, 256), (64, 128, 256), (64, 128), (2, 3, 4, 5)
    )
]


def rank(asked: GemmTile, tile: GemmTile) -> tuple[int, int, int]:
    """Larger is preferred: tile, then depth, then stages."""
    return (tile.m * tile.n, tile.k, tile.stages)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("element", [1, 2])
def test_b02_clamped_tiles_fit_and_are_maximal(limit: int, element: int) -> None:
    for asked in TILES:
        result = clamp_tile(asked, element, limit)
        if asked.shared_bytes(element) <= limit:
            assert result.tile == asked and result.reason is None
            continue
        tile = result.tile
        assert tile is not None and result.reason is not None
        assert tile.shared_bytes(element) <= limit
        assert f"{asked.m}x{asked.n}x{asked.k}" in result.reason.message
        assert f"{tile.m}x{tile.n}x{tile.k} in {tile.stages}" in result.reason.message
        # Nothing that the order prefers fits: one stage more, twice the depth, twice a side.
        if tile.stages < asked.stages:
            more = GemmTile(tile.m, tile.n, tile.k, tile.stages + 1)
            assert more.shared_bytes(element) > limit
        if tile.k < asked.k:
            assert GemmTile(tile.m, tile.n, tile.k * 2, 2).shared_bytes(element) > limit
        if (tile.m, tile.n) != (asked.m, asked.n):
            side = (tile.m * 2, tile.n) if tile.m < asked.m else (tile.m, tile.n * 2)
            assert GemmTile(*side, MIN_K, 2).shared_bytes(element) > limit


def test_b02_known_tiles_of_the_field() -> None:
    """The field's 147,456 B tile on a card with 101,376 B."""
    asked = GemmTile(128, 256, 64, 4)
    assert asked.shared_bytes(2) == 147_456
    assert clamp_tile(asked, 2, 101_376).tile == GemmTile(128, 256, 64, 3)
    assert clamp_tile(asked, 2, 166_912).tile == asked
    assert clamp_tile(GemmTile(16, 16, 32, 2), 2, 100).tile is None


BUCKETS = (128, 256, 512, 1024, 2048)


def test_b03_widths_go_to_the_next_instantiation() -> None:
    for width in range(1, 2049):
        padded = pad_to_instantiation("top-k", width, BUCKETS)
        assert padded.size == min(b for b in BUCKETS if b >= width)
        assert 0 <= padded.wasted < 1
    assert (
        pad_to_instantiation("top-k", 192, BUCKETS).message
        == "top-k 192 padded to 256, 25 % wasted"
    )
    refused = pad_to_instantiation("heads", 4096, BUCKETS)
    assert refused.size is None and "128, 256, 512, 1024, 2048" in refused.message
    assert pad_to_instantiation("heads", 0, BUCKETS).size is None
    assert "none" in pad_to_instantiation("heads", 1, ()).message


@given(st.integers(1, 300), st.integers(0, 2**31))
def test_b03_padding_an_index_list_changes_nothing(width: int, seed: int) -> None:
    """Index lists padded with -1, as a sparse kernel of the next width would read them."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(400, 8, generator=g, dtype=torch.float64)
    q = torch.randn(8, generator=g, dtype=torch.float64)
    picked = torch.randperm(400, generator=g)[:width]
    size = pad_to_instantiation("top-k", width, BUCKETS).size
    assert size is not None
    padded = torch.full((size,), -1)
    padded[:width] = picked
    scores = (keys[padded.clamp_min(0)] @ q).masked_fill(padded < 0, float("-inf"))
    got = torch.softmax(scores, 0) @ keys[padded.clamp_min(0)]
    want = torch.softmax(keys[picked] @ q, 0) @ keys[picked]
    torch.testing.assert_close(got, want)
