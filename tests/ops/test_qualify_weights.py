"""Judging of products with block-scaled weights: both arithmetics pass, what lies between fails."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_qualify import HOST, REGISTRY
from torch import Tensor

from metainfer.formats.blocks import FORMATS
from metainfer.ops.activation.torch_swiglu import swiglu
from metainfer.ops.case import Weight
from metainfer.ops.catalog import op_cases
from metainfer.ops.linear import torch_stored
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.rounding import round_activations
from metainfer.ops.linear.stored import matrix
from metainfer.ops.moe_experts import torch_experts
from metainfer.ops.moe_experts.cases import _steady
from metainfer.ops.qualify import qualify

linear = torch_stored.linear


def half_rounded(x: Tensor, weight: PackedWeight) -> Tensor:
    """The mean of the two legal results."""
    rounded = linear(x, weight).double()
    plain = x.double() @ matrix(weight, torch.float64).T
    if weight.bias is not None:
        plain = plain + weight.bias.double()
    return ((rounded + plain) / 2).to(x.dtype)


def groups_of_32(x: Tensor, weight: PackedWeight) -> Tensor:
    if weight.format is None:
        return linear(x, weight)
    return linear(round_activations(x, 32), weight)


def whole_rows(x: Tensor, weight: PackedWeight) -> Tensor:
    if weight.format is None:
        return linear(x, weight)
    return linear(round_activations(x, x.shape[1]), weight)


def loses_a_scale(x: Tensor, weight: PackedWeight) -> Tensor:
    """The scales of the second tensor start a row late."""
    if weight.format is None or len(weight.parts) == 1:
        return linear(x, weight)
    scales = weight.data["scales"].clone()
    scales[-1] = scales[0]
    return linear(x, dataclasses.replace(weight, data={**weight.data, "scales": scales}))


def transposed_second(x: Tensor, weight: PackedWeight) -> Tensor:
    if "second" not in weight.data:
        return linear(x, weight)
    data = {**weight.data, "second": weight.data["second"].flip(0)}
    return linear(x, dataclasses.replace(weight, data=data))


def _experts(change: Callable[..., Any], name: str) -> Callable[..., Tensor]:
    """`torch_experts.recipe` with one of its parts replaced."""

    def function(*args: Any, **kwargs: Any) -> Tensor:
        keep = getattr(torch_experts, name)
        setattr(torch_experts, name, change)
        try:
            return torch_experts.recipe(*args, **kwargs)
        finally:
            setattr(torch_experts, name, keep)

    return function


def rounds_nothing_hidden(rows: Tensor, group: int) -> Tensor:
    """x is rounded, the hidden activation (of F channels) is not."""
    return rows if rows.shape[1] in (32, 40, 48, 64, 72) else round_activations(rows, group)


def clamps_the_gate_below(both: Tensor, limit: float) -> Tensor:
    return swiglu(both.clamp(-limit, limit) if limit else both)


def weighs_after(
    x: Tensor, ids: Tensor, weights: Tensor, w13: PackedWeight, w2: PackedWeight, *shared: Tensor,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """One choice at a time, weighted after w2: other roundings of the hidden activation."""
    total = torch.zeros_like(x, dtype=torch.float64)
    for slot in range(ids.shape[1]):
        one = ids[:, slot : slot + 1]
        unit = torch.ones_like(weights[:, :1])
        part = torch_experts.recipe(x.double(), one, unit, w13, w2, **kwargs)
        total += part * weights[:, slot : slot + 1]
    return sum(shared, total.to(x.dtype))


def takes_minus_one_for_the_last(
    x: Tensor, ids: Tensor, weights: Tensor, w13: PackedWeight, w2: PackedWeight, *shared: Tensor,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    last = w2.shape[0] // w13.shape[1] - 1
    ids = torch.where(ids < 0, last, ids)
    return torch_experts.recipe(x, ids, weights, w13, w2, *shared, **kwargs)


def swaps_gate_and_up(
    x: Tensor, ids: Tensor, weights: Tensor, w13: PackedWeight, w2: PackedWeight, *shared: Tensor,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    order = torch.arange(len(w13.parts)).view(-1, 2).flip(1).flatten()
    data = {
        key: held.unflatten(0, (len(w13.parts), -1))[order].flatten(0, 1)
        for key, held in w13.data.items()
    }
    swapped = dataclasses.replace(w13, data=data)
    return torch_experts.recipe(x, ids, weights, swapped, w2, *shared, **kwargs)


FAULTS: list[tuple[str, Callable[..., Any], str]] = [
    ("linear", half_rounded, "float32"),
    ("linear", half_rounded, "bfloat16"),
    ("linear", groups_of_32, "float32"),
    ("linear", whole_rows, "bfloat16"),
    ("linear", loses_a_scale, "bfloat16"),
    ("linear", transposed_second, "bfloat16"),
    ("moe_experts", _experts(rounds_nothing_hidden, "round_activations"), "float32"),
    ("moe_experts", _experts(rounds_nothing_hidden, "round_activations"), "bfloat16"),
    ("moe_experts", _experts(clamps_the_gate_below, "swiglu_clamp"), "bfloat16"),
    ("moe_experts", weighs_after, "float32"),
    ("moe_experts", takes_minus_one_for_the_last, "bfloat16"),
    ("moe_experts", swaps_gate_and_up, "bfloat16"),
]


@pytest.mark.parametrize(("op", "fault", "dtype"), FAULTS, ids=lambda v: getattr(v, "__name__", v))
def test_planted_faults_are_refused(
    op: str, fault: Callable[..., Any], dtype: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PLANTED", fault, raising=False)
    recipe = next(impl for impl in REGISTRY.of(op) if impl.name == "recipe")
    impl = dataclasses.replace(recipe, load=f"{__name__}:PLANTED")
    verdict = qualify(impl, dtype, "cpu", HOST, REGISTRY, seed=seed)
    assert not verdict.accepted
    assert {reason.code for reason in verdict.reasons} == {"error"}


@pytest.mark.parametrize("name", ["linear", "linear_f32", "moe_experts"])
def test_every_block_format_has_a_case(name: str) -> None:
    cases = op_cases(name).CASES[name](0)
    met = {scheme for case in cases for scheme in case.schemes}
    assert {"fp8_128", "fp8_32", "fp8_128_f32", "mxfp4", "nvfp4"} <= met
    assert name in op_cases(name).ROUNDED


def test_hidden_activations_of_cases_are_off_the_middles(seed: int) -> None:
    """Or a kernel with another order of sums would fail now and then."""
    from metainfer.ops.moe_experts.cases import SIZES

    cases = op_cases("moe_experts").CASES["moe_experts"](seed)
    for case, sizes in zip(cases, SIZES, strict=True):
        x, ids, weights, up, down = case.args[:5]
        if sizes.scheme in FORMATS:
            assert isinstance(up, Weight)
            assert _steady(x, ids, weights, up.raws, down.raws, sizes), case.name
