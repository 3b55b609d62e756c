"""The step of the hyper-connections for bfloat16 on the host, against the references in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from gluon_model import loaded, value
from torch import Tensor

from metainfer.ops.case import errors
from metainfer.ops.hyper import tiles
from metainfer.ops.hyper.ref import hyper_mix
from metainfer.ops.hyper.tiles import LONG, SHORT, product_lanes

KERNELS = loaded(Path(tiles.__file__).with_name("triton_direct.py"))
BF16 = torch.bfloat16


def _noise(rows: int, n: int, d: int, numbers: int) -> tuple[Tensor, Tensor]:
    """Streams [rows, n, d] and a site's matrix [numbers, n d]."""
    g = torch.Generator().manual_seed(7)
    streams = torch.randn(rows, n, d, generator=g).to(BF16)
    return streams, torch.randn(numbers, n * d, generator=g)


def _sums(seen: Tensor, fn: Tensor) -> Tensor:
    """Products and the sum of squares of streams [rows, n, d]: [rows, numbers + 1], in float64."""
    flat = seen.double().flatten(1)
    return torch.cat((flat @ fn.double().T, flat.square().sum(1, keepdim=True)), 1)


def _step(
    rows: int, n: int, d: int, splits: int, *, mix: bool, numbers: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mixed, their truth, the sums of the parts, their truth) of one launch on poisoned memory."""
    tile, numbers = SHORT, numbers or (n + 2) * n
    streams, fn = _noise(rows, n, d, numbers)
    g = torch.Generator().manual_seed(8)
    y = torch.randn(rows, d + 3, generator=g).to(BF16)  # its rows are wider than the streams'
    post, comb = torch.rand(rows, n, generator=g) * 2, torch.rand(rows, n, n, generator=g)
    lanes = product_lanes(numbers)
    mixed = torch.full_like(streams, torch.nan)
    parts = torch.full((splits, rows, lanes), torch.nan)
    steps = math.ceil(math.ceil(d / tile.d) / splits)
    KERNELS.step_kernel[(math.ceil(rows / tile.m), splits)](
        streams, y, post, comb, mixed, fn, parts, rows, splits, steps, d + 3, n, d, numbers, lanes,
        tile.m, tile.d, mix, tile.across, False,
    )  # fmt: skip
    assert mix or mixed.isnan().all()
    assert not parts.isnan().any()
    truth = hyper_mix(*(a.double() for a in (streams, y[:, :d], post, comb)))
    return mixed, truth, parts.sum(0)[:, : numbers + 1], _sums(mixed if mix else streams, fn)


@pytest.mark.parametrize(
    ("rows", "n", "d", "splits"),
    [(1, 4, 33, 1), (17, 4, 96, 2), (5, 3, 70, 3), (3, 2, 17, 1), (2, 1, 40, 2)],
)
def test_step_mixes_and_multiplies_what_it_wrote(rows: int, n: int, d: int, splits: int) -> None:
    mixed, truth, sums, want = _step(rows, n, d, splits, mix=True)
    assert max(errors(mixed, truth)) < 2**-8  # rounded once
    assert max(errors(sums, want)) < 4e-7


@pytest.mark.parametrize("numbers", [24, 4])
def test_step_takes_streams_as_they_are(numbers: int) -> None:
    _, _, sums, want = _step(19, 4, 70, 2, mix=False, numbers=numbers)
    assert max(errors(sums, want)) < 4e-7


@pytest.mark.parametrize(
    ("rows", "n", "d", "splits", "numbers"),
    [(67, 4, 96, 2, 24), (65, 4, 33, 3, 24), (5, 3, 70, 1, 15), (130, 4, 64, 8, 4)],
)
def test_product_of_streams_end_to_end(
    rows: int, n: int, d: int, splits: int, numbers: int
) -> None:
    """A part may end within a step's channels, and the last may have none at all."""
    streams, fn = _noise(rows, n, d, numbers)
    lanes = product_lanes(numbers)
    parts = torch.full((splits, rows, lanes), torch.nan)
    steps = math.ceil(math.ceil(n * d / LONG.d) / splits)
    KERNELS.product_kernel[(math.ceil(rows / LONG.m), splits)](
        streams, fn, parts, rows, steps, n * d, numbers, lanes, LONG.m, LONG.d, LONG.down
    )
    assert not parts.isnan().any()
    assert max(errors(parts.sum(0)[:, : numbers + 1], _sums(streams, fn))) < 4e-7


def test_weights_are_three_parts_that_bfloat16_holds_and_lose_nothing() -> None:
    g = torch.Generator().manual_seed(3)
    sizes = torch.exp2(torch.randint(-90, 90, (1 << 12,), generator=g))
    x = torch.randn(1 << 12, generator=g) * sizes
    x[:4] = torch.tensor([0.0, -0.0, 1 + 2.0**-23, -(2 - 2.0**-23)])
    parts = KERNELS._in_three(value(x))
    assert all(part.dtype == BF16 for part in parts)
    assert torch.equal(sum(part.double() for part in parts), x.double())


def _toward_zero(x: Tensor) -> Tensor:
    near = x.float()
    over = near.double().abs() > x.abs()
    return torch.where(over, torch.nextafter(near, torch.zeros_like(near)), near)


def _cutting_unit(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """16 products at a time are added to the sum, which is cut where IEEE rounds."""
    for k in range(0, a.shape[1], 16):
        total = _toward_zero(total.double() + a[:, k : k + 16].double() @ b[k : k + 16].double())
    return total


def test_cut_sums_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's 8,192 products in one part: chains of the unit's cut sums stay short."""
    monkeypatch.setattr(KERNELS, "mma_v2", _cutting_unit)
    _, _, sums, want = _step(2, 4, 2048, 1, mix=False)
    assert errors(sums[:, :24], want[:, :24])[0] < 1e-6
