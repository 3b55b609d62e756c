"""Layouts of several roles in one bundle, and what its phases weigh."""

from __future__ import annotations

import pytest
from machines import LAYOUT_A, LAYOUT_B, card, kernel, request, trusted

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.step import Phase
from metainfer.kernels.choice import Policy
from metainfer.kernels.impl import Layout
from metainfer.kernels.registry import Registry
from metainfer.kernels.select import select


def test_a_layout_s_schemes_bind_the_ops_that_read_its_role() -> None:
    """Experts may be stored in what the layout of the other weights does not pack."""
    plain = Layout(id="a@1", role="weight", schemes=frozenset({"BF16"}))
    four_bit = Layout(id="e@1", role="experts", schemes=frozenset({"mxfp4"}))
    registry = Registry(
        [
            kernel("fast", op="linear", requires_layout={"weight": "a@1"}),
            kernel("each", op="experts", requires_layout={"experts": "e@1"}),
        ],
        [plain, four_bit],
    )
    asked = (request("linear", schemes=("BF16",)), request("experts", schemes=("mxfp4",)))
    policy = Policy(evidence=trusted(registry))
    assert select(registry, asked, card((9, 0)), policy).bundle.name == "e@1 + a@1"
    swapped = (asked[0], request("experts", schemes=("BF16",)))
    with pytest.raises(RefusedError) as caught:
        select(registry, swapped, card((9, 0)), policy)
    assert [r.message for r in caught.value.reasons] == ["e@1 does not pack BF16"]


def test_a_pin_for_a_role_that_the_model_has_not_is_refused() -> None:
    """It was dropped in silence before: a model without an indexer took a layout of index keys."""
    registry = Registry(
        [
            kernel("fast", op="linear", requires_layout={"weight": "a@1"}),
            kernel("pick", op="select", requires_layout={"index": "i@1"}),
        ],
        [Layout(id="a@1", role="weight"), Layout(id="i@1", role="index")],
    )
    policy = Policy(evidence=trusted(registry), layout_pins={"index": "i@1"})
    with pytest.raises(UsageError, match=r"the role 'index'.*It has: weight"):
        select(registry, (request("linear"),), card((9, 0)), policy)
    both = (request("linear"), request("select"))
    assert select(registry, both, card((9, 0)), policy).bundle.name == "i@1 + a@1"
    # A layout that another model's ops read is not this one's either.
    foreign = Policy(evidence=trusted(registry), layout_pins={"weight": "k@1"})
    registry.add_layout(Layout(id="k@1", role="weight"))
    with pytest.raises(UsageError, match=r"no weight layout 'k@1'.*There is: a@1"):
        select(registry, both, card((9, 0)), foreign)


def test_phases_weigh_by_their_steps_for_a_token_of_an_answer() -> None:
    """Faster for prompts or for answers: which of the two wins is for the share of each to say."""
    both = Registry(
        [
            kernel(name, seconds, op="linear", requires_layout={"weight": layout}, phases={phase})
            for name, layout, phase, seconds in (
                ("a-chunk", "a@1", Phase.CHUNK, 6.0),
                ("a-decode", "a@1", Phase.DECODE, 2.0),
                ("b-chunk", "b@1", Phase.CHUNK, 4.0),
                ("b-decode", "b@1", Phase.DECODE, 3.0),
            )
        ],
        [LAYOUT_A, LAYOUT_B],
    )
    asked = [request("linear", phase) for phase in (Phase.CHUNK, Phase.DECODE)]
    policy, facts = Policy(evidence=trusted(both)), card((9, 0))

    def taken(chunks: float, decodes: float) -> tuple[str, float | None]:
        steps = {Phase.CHUNK: chunks, Phase.DECODE: decodes}
        bundle = select(both, asked, facts, policy, steps).bundle
        return bundle.name, bundle.seconds

    assert select(both, asked, facts, policy).bundle.name == "b@1"  # 4 + 3 against 6 + 2
    assert taken(1, 1) == ("b@1", 7.0)
    assert taken(0.25, 1) == ("a@1", 3.5)  # against 4
    assert taken(1, 0.5) == ("b@1", 5.5)
