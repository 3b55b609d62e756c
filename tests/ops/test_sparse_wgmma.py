"""The Hopper form of sparse attention on the host: its pipeline against float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gluon_model import loaded
from torch import Tensor

from metainfer.ops.attn_sparse import tiles
from metainfer.ops.attn_sparse.tiles import MAX_SPLITS, splits_for
from metainfer.ops.common import rotate_tail

HEADS, D, R, TILE = 64, 16, 4, 64
LOG2E = 1.4426950408889634
KERNELS = loaded(Path(tiles.__file__).with_name("triton_wgmma.py"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than such small products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _run(
    counts: list[int], splits: int, blocks: int = 1, programs: int = 0
) -> tuple[Tensor, Tensor]:
    """(result, truth) of a query per count; what no query lists is poison. `programs` 0: one an
    item."""
    g = torch.Generator().manual_seed(3)
    rows, width, heads = len(counts), max(counts) + 3, HEADS * blocks
    cache = torch.randn(200, D, generator=g, dtype=torch.float64)
    places = torch.randint(0, 100, (rows, width), generator=g)
    for row, count in enumerate(counts):
        places[row, count:] = 100
    cache[100:] = torch.nan
    q = torch.randn(rows, heads, D, generator=g, dtype=torch.float64) * 2
    sinks = torch.randn(heads, generator=g, dtype=torch.float64)
    positions = torch.randint(0, 50, (rows,), generator=g)
    angles = torch.rand(50, R // 2, generator=g, dtype=torch.float64) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    out = torch.full_like(q, torch.nan)
    parts = torch.full((rows, heads, splits, D), torch.nan, dtype=torch.float64)
    peaks = torch.full((rows, heads, splits), torch.nan, dtype=torch.float64)
    totals = peaks.clone()
    items = rows * blocks * splits
    KERNELS.sparse_kernel[(programs or items,)](
        q, cache, places * D, torch.tensor(counts), sinks, cos_sin, positions, out, parts, peaks,
        totals, 0.3 * LOG2E, items, heads * D, width, heads, D, R, HEADS, TILE, splits, 8, False,
    )  # fmt: skip
    truth = torch.zeros_like(q)
    for row, count in enumerate(counts):
        if count:
            keys = cache[places[row, :count]]
            logits = torch.cat((q[row] @ keys.T * 0.3, sinks[:, None]), 1)
            mixed = logits.softmax(1)[:, :-1] @ keys
            truth[row] = rotate_tail(mixed, cos_sin[positions[row]], inverse=True)
    if splits > 1:
        held = ~parts.isnan().any(3) & (peaks > -torch.inf)
        above = torch.maximum(peaks.amax(2), sinks * LOG2E)
        fade = torch.where(held, torch.exp2(peaks - above[..., None]), 0)
        total = (totals.nan_to_num() * fade).sum(2) + torch.exp2(sinks * LOG2E - above)
        mixed = (parts.nan_to_num() * fade[..., None]).sum(2) / total[..., None]
        out = rotate_tail(mixed, cos_sin[positions][:, None], inverse=True)
    live = torch.tensor(counts) > 0
    return out[live], truth[live]


COUNTS = [1, TILE - 1, TILE, TILE + 1, 2 * TILE, 0, 3 * TILE + 5, 300]


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_tiles_of_keys_give_attention(splits: int) -> None:
    found, truth = _run(COUNTS, splits)
    assert (found - truth).abs().max() < 5e-6  # the kernel's own sums are float32


def test_heads_past_the_first_block_read_their_own_queries() -> None:
    found, truth = _run([11, 130], splits=1, blocks=2)
    assert (found - truth).abs().max() < 5e-6


@pytest.mark.parametrize(("programs", "blocks"), [(1, 1), (2, 1), (3, 1), (1, 2)])
def test_a_program_takes_several_queries(programs: int, blocks: int) -> None:
    found, truth = _run([*COUNTS, 0, 0, 12, 3], 1, blocks, programs)
    assert (found - truth).abs().max() < 5e-6


def test_a_part_without_keys_says_so_and_writes_nothing_else() -> None:
    found, truth = _run([3], splits=4)
    assert (found - truth).abs().max() < 5e-6


def test_keys_are_cut_into_as_many_parts_as_one_wave_holds() -> None:
    assert splits_for(32, 10, 132) == 4  # five would be 160 programs
    assert splits_for(1, 10, 132) == 16  # each tile its own
    for programs in (1, 3, 8, 66, 67, 132, 8192):
        for held in (1, 2, 6, 18, 400):
            parts = splits_for(programs, held, 132)
            assert parts == 1 or (programs * parts <= 132 and parts < 2 * held)
            more = 2 * parts
            assert programs * more > 132 or more > MAX_SPLITS or parts >= held
