"""Activation rounding of the recipe: element by element in Python, floors, ties, damage."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from metainfer.core.errors import UsageError
from metainfer.formats import activation, elements

Rule = Callable[[Tensor], Tensor]
#: function, width, group, largest element, floor of amax, dimensions kept as they are
RULES: list[tuple[Rule, int, int, float, float, int]] = [
    (activation.activation_fp8, 256, 128, 448.0, 1e-4, 0),
    (activation.index_fp4, 128, 32, 6.0, 6 * 2.0**-126, 0),
    (activation.kv_fp8, 512, 64, 448.0, 1e-4, 64),
]
IDS = [rule[0].__name__ for rule in RULES]


def by_hand(row: list[float], group: int, largest: float, floor: float) -> list[float]:
    out = []
    codes = torch.arange(127 if largest == 448.0 else 8, dtype=torch.uint8)
    grid = (elements.e4m3_decode if largest == 448.0 else elements.e2m1_decode)(
        codes, torch.float64
    ).tolist()
    for start in range(0, len(row), group):
        block = row[start : start + group]
        amax = max(floor, *map(abs, block))
        exponent = -200
        while amax > largest * 2.0**exponent:
            exponent += 1
        scale = 2.0**exponent
        for value in block:
            size = abs(value) / scale
            best = min(range(len(grid)), key=lambda c: (abs(grid[c] - size), c % 2))
            out.append(math.copysign(grid[best] * scale, value))
    return out


@pytest.mark.parametrize("rule", RULES, ids=IDS)
@pytest.mark.parametrize("size", [1e-38, 1e-5, 1.0, 1e4])
def test_values_are_the_recipe_s(
    rule: tuple[Rule, int, int, float, float, int], size: float, seed: int
) -> None:
    function, width, group, largest, floor, kept = rule
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(3, width, generator=generator) * size).bfloat16()
    x[1, :group] = 0.0
    x[2, 0] = -0.0
    y = function(x)
    assert y.dtype == torch.bfloat16 and y.shape == x.shape
    for row in range(3):
        body = x[row, : width - kept].double().tolist()
        expected = torch.tensor(by_hand(body, group, largest, floor), dtype=torch.float64)
        assert torch.equal(y[row, : width - kept], expected.bfloat16())
        assert torch.equal(torch.signbit(y[row]), torch.signbit(x[row]))
        assert torch.equal(y[row, width - kept :], x[row, width - kept :])


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_rounding_twice_is_rounding_once(
    rule: tuple[Rule, int, int, float, float, int], seed: int
) -> None:
    x = torch.randn(5, rule[1], generator=torch.Generator().manual_seed(seed))
    once = rule[0](x)
    assert torch.equal(rule[0](once), once)
    assert torch.allclose(rule[0](x.double()).float(), once, rtol=0, atol=0)


@pytest.mark.parametrize("damage", [math.nan, math.inf])
@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_damage_fills_its_group(
    rule: tuple[Rule, int, int, float, float, int], damage: float
) -> None:
    x = torch.ones(2, rule[1])
    x[0, 3] = damage
    y = rule[0](x)
    assert torch.isnan(y[0, : rule[2]]).all() and int(torch.isnan(y).sum()) == rule[2]


def test_the_floor_decides_the_scale_of_small_groups() -> None:
    # 1e-4 / 448 rounds up to 2^-22, so half a step of the smallest e4m3 value is 2^-32.
    x = torch.zeros(1, 128)
    x[0, :3] = torch.tensor([2.0**-32, 3 * 2.0**-32, 1.5 * 2.0**-31])
    assert activation.activation_fp8(x)[0, :3].tolist() == [0.0, 2.0**-30, 2.0**-31 * 2]
    tiny = torch.zeros(1, 32)
    tiny[0, 0] = 2.0**-127  # half of the smallest scale: e2m1 0.5 * 2^-126
    assert float(activation.index_fp4(tiny)[0, 0]) == 2.0**-127
    tiny[0, 0] = 2.0**-128  # a tie between 0 and 0.5 goes to 0
    assert float(activation.index_fp4(tiny)[0, 0]) == 0.0


def test_v41_window_rounds_all_dimensions_in_groups_of_32(seed: int) -> None:
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(seed))
    y = activation.kv_fp8(x, group=32, rope=0)
    expected = [by_hand(row, 32, 448.0, 1e-4) for row in x.double().tolist()]
    assert torch.equal(y, torch.tensor(expected, dtype=torch.float64).float())


def test_v41_main_entries_have_e4m3_scales(seed: int) -> None:
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(seed))
    x[0, :16], x[1, :16], x[2, :16] = 0.0, 2.0**-10, 1e5
    y = activation.kv_fp4(x)
    amax = x.reshape(4, 32, 16).abs().amax(-1)
    scale = (amax / 6).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float()
    ratio = y.reshape(4, 32, 16) / scale[..., None]
    grid = elements.e2m1_decode(torch.arange(16))
    assert torch.isin(ratio, grid).all()
    assert (y[0, :16] == 0).all() and (y[1, :16] == 2.0**-10).all()  # scale 2^-9, not 0
    assert (y[2, :16] == 6 * 448).all()
    nearest = (grid * scale[..., None, None] - x.reshape(4, 32, 16, 1)).abs().amin(-1)
    assert torch.allclose((y - x).abs().reshape(4, 32, 16), nearest, rtol=1e-6)
    x[3, 0] = math.nan
    assert int(torch.isnan(activation.kv_fp4(x)).sum()) == 16


def test_widths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match=r"100 channels .* groups of 128"):
        activation.activation_fp8(torch.zeros(2, 100))
    with pytest.raises(UsageError, match="no room for 64"):
        activation.kv_fp8(torch.zeros(2, 64))


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_no_rows(rule: tuple[Rule, int, int, float, float, int]) -> None:
    assert rule[0](torch.zeros(0, rule[1])).shape == (0, rule[1])
