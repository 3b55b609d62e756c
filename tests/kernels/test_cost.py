"""The cost model: unknown facts give no estimate; memory and arithmetic bound the time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import card, host, request

from metainfer.core.step import Phase
from metainfer.kernels.cost import (
    LAUNCH_S,
    WIDE_SHARE,
    attention_operations,
    attention_traffic,
    elementwise,
    in_turn,
    linear_operations,
    linear_traffic,
    roofline,
)
from metainfer.kernels.impl import Context
from metainfer.ops.catalog import builtin_registry
from metainfer.platform.facts import Facts

LINEAR = {"rows": 4, "n": 100, "k": 50}


def context(shape: dict[str, int], facts: Facts | None = None, dtype: str = "bfloat16") -> Context:
    return Context(request(shape=shape, dtype=dtype), facts or card((9, 0)))


def test_unknown_bandwidth_gives_no_estimate() -> None:
    facts = card((9, 0))
    blind = Facts(platform="cuda", devices=(replace(facts.device, read_bytes_s=None),))
    assert roofline(lambda c: 1.0)(context({}, blind)) is None


def test_cpu_takes_the_host_s_bandwidth() -> None:
    facts = host()
    device = replace(facts.device, read_bytes_s=None)
    moved = replace(facts, devices=(device,), host=replace(facts.host, read_bytes_s=1e10))
    assert roofline(lambda c: 1e10)(context({}, moved)) == pytest.approx(1 + LAUNCH_S["cpu"])


def test_memory_and_arithmetic_are_a_maximum_and_launches_add() -> None:
    """The simulated card reads 1e12 B/s and multiplies at 1e14 FLOP/s."""
    cost = roofline(lambda c: 1e12, lambda c: 2e14, launches=3, part=0.5, compute_part=1.0)
    assert cost(context({})) == pytest.approx(2.0 + 3 * LAUNCH_S["cuda"])
    bound = roofline(lambda c: 1e12, lambda c: 5e14, compute_part=1.0)
    assert bound(context({})) == pytest.approx(5.0 + LAUNCH_S["cuda"])
    # The card names no rate for float32: a share of the slowest it names.
    wide = 5e14 / (1e14 * WIDE_SHARE)
    assert bound(context({}, dtype="float32")) == pytest.approx(wide + LAUNCH_S["cuda"])


def test_steps_in_turn_add() -> None:
    """On an H200 a plan took the recipe's grouped product for long chunks, 256 us slower each: its
    decoding was hidden behind the product that waits for it."""
    move, multiply = roofline(lambda c: 1e12), roofline(lambda c: 0.0, lambda c: 7e13)
    each = [move(context({})), multiply(context({}))]
    assert in_turn(move, multiply)(context({})) == pytest.approx(sum(s or 0.0 for s in each))
    facts = card((9, 0))
    blind = Facts(platform="cuda", devices=(replace(facts.device, read_bytes_s=None),))
    assert in_turn(move, lambda c: None)(context({})) is None
    assert in_turn(move, multiply)(context({}, blind)) is None


def test_amounts() -> None:
    assert linear_operations(context(LINEAR)) == 2 * 4 * 100 * 50
    assert linear_traffic()(context(LINEAR)) == (100 * 50 + 4 * 150) * 2
    assert linear_traffic(0.625)(context(LINEAR)) == 100 * 50 * 0.625 + 4 * 150 * 2
    seen = {"rows": 2, "seqs": 2, "context": 1000, "hq": 8, "hkv": 2, "d": 64}
    assert attention_traffic()(context(seen)) == (2 * 1000 * 2 * 64 * 2 + 2 * 2 * 8 * 64) * 2
    assert attention_operations(context(seen)) == 4 * 2 * 1000 * 8 * 64
    windowed = {**seen, "window": 100}
    assert attention_operations(context(windowed)) == 4 * 2 * 100 * 8 * 64
    assert elementwise(lambda c: 5e11)(context({})) == pytest.approx(1.0 + LAUNCH_S["cuda"])


def test_streaming_blocks_beats_dense_by_its_bytes() -> None:
    impls = {impl.name: impl for impl in builtin_registry().of("linear")}
    shape = {"rows": 1, "n": 1536, "k": 576}
    asked = request("linear", Phase.DECODE, shape=shape, dtype="float32", schemes=("Q4_1",))
    here = Context(asked, host())
    costs = {name: impl.cost(here) for name, impl in impls.items() if impl.cost is not None}
    assert costs["c"] is not None and costs["onednn"] is not None and costs["torch"] is not None
    assert costs["c"] < costs["onednn"] < costs["torch"]


def test_every_shipped_implementation_has_a_cost() -> None:
    """Else the ones without would rank behind, whatever they are worth."""
    assert [impl.id for impl in builtin_registry().impls() if impl.cost is None] == []


def test_a_type_without_a_rate_is_not_free_beside_those_with_one() -> None:
    """Seen on a card whose file names bf16 and FP8 rates: a float32 path ranked by bytes alone beat
    the card's own FP8 kernel on prompts of 8,192 tokens."""
    own, wide = (
        roofline(lambda c: 1.0, lambda c: 1e14, element=element)
        for element in ("bfloat16", "float32")
    )
    facts = card((9, 0))
    assert wide(context({})) > 5 * own(context({}))  # type: ignore[operator]
    # Where no rate at all is known the memory term stands alone.
    blind = replace(facts, devices=(replace(facts.device, dot_flops={}),))
    assert wide(context({}, blind)) == own(context({}, blind)) < 1e-3  # type: ignore[operator]
