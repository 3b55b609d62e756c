"""Layouts of several roles in one bundle."""

from __future__ import annotations

import pytest
from machines import card, kernel, request, trusted

from metainfer.core.errors import RefusedError, UsageError
from metainfer.kernels.impl import Layout
from metainfer.kernels.registry import Registry
from metainfer.kernels.select import Policy, select


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
