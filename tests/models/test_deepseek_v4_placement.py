"""Which rank holds what, and which layouts are refused, with every reason."""

from __future__ import annotations

from collections import Counter

import pytest
from test_deepseek_v4_arch import released

from metainfer.core.plan import LayoutPlan
from metainfer.formats.blocks import FP8_128, MXFP4
from metainfer.models.arch import Cut
from metainfer.models.deepseek_v4.config import read_arch
from metainfer.models.deepseek_v4.placement import cut, objections

ARCH = read_arch(released())
STORED = {
    **dict.fromkeys(
        ("linear.wq_b", "out_group", "linear.wo_b", "linear.shared13", "linear.shared2"),
        FP8_128.block,
    ),
    **dict.fromkeys(("experts.w13", "experts.w2"), MXFP4.block),
}


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_degrees_that_keep_groups_whole_are_accepted(tensor: int) -> None:
    assert objections(ARCH, LayoutPlan(name="tp", tensor=tensor), STORED).accepted


def test_sixteen_ranks_would_cut_an_output_group() -> None:
    verdict = objections(ARCH, LayoutPlan(name="tp16", tensor=16), STORED)
    assert {reason.code for reason in verdict.reasons} == {"divides"}


def test_all_reasons_come_at_once() -> None:
    verdict = objections(ARCH, LayoutPlan(name="tp3", tensor=3, expert=7), STORED)
    text = " ".join(reason.message for reason in verdict.reasons)
    for part in ("output groups", "vocabulary", "experts", "linear.shared13", "linear.wo_b"):
        assert part in text, part


def test_a_share_must_hold_whole_blocks() -> None:
    narrow = read_arch(released(moe_intermediate_size=512))
    verdict = objections(narrow, LayoutPlan(name="tp8", tensor=8), STORED)
    sites = {reason.data["site"] for reason in verdict.reasons}
    assert sites == {"linear.shared13", "linear.shared2"}  # 64 rows cut an FP8 block, not 2 x 32


def test_weights_of_one_of_eight_ranks() -> None:
    """The published account: routed 18.4 GB of MXFP4, the rest whole where it is replicated."""
    layout = LayoutPlan(name="ep8", data=8, expert=8)
    held = Counter[str]()
    for spec in ARCH.packed_weights():
        held[spec.site] += spec.elements // cut(spec, layout)[1]
    routed = held["experts.w13"] + held["experts.w2"]
    assert routed * 17 / 32 / 1e9 == pytest.approx(18.4, abs=0.02)
    assert held["linear.lm_head"] == 129280 * 4096
    specs = {spec.site: spec for spec in ARCH.packed_weights()}
    assert cut(specs["experts.w13"], layout) == (Cut.EXPERTS, 8)
    assert cut(specs["linear.wqkv"], LayoutPlan(name="tp8", tensor=8)) == (Cut.WHOLE, 1)
    assert cut(specs["linear.wo_b"], LayoutPlan(name="tp8", tensor=8)) == (Cut.COLUMNS, 8)
