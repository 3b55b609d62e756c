"""What no plan may do, whatever the machine; each phase's layout; one decision explained."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import GOALS, Intent
from metainfer.core.ledger import DecisionLedger, Origin
from metainfer.core.plan import LayoutPlan
from metainfer.engine.elsewhere import Elsewhere, describe
from metainfer.kernels.choice import Policy
from metainfer.kernels.impl import Evidence
from metainfer.ops.catalog import builtin_registry
from metainfer.planner.explain import explain_lines, explained
from metainfer.planner.opening import open_model
from metainfer.planner.phases import ANSWER, record_phases, request_seconds
from metainfer.planner.predict import Prediction
from metainfer.planner.report import plan_document
from metainfer.planner.resolve import Resolved, resolve
from metainfer.planner.weights import census
from metainfer.platform.facts import Facts

FLASH, QWEN = "random:deepseek-v4-flash?layers=8", "random:qwen3-8b?layers=4"
REGISTRY = builtin_registry()


@cache
def eight(rate: float = 200e12) -> Elsewhere:
    """Eight cards whose matrix rate is known."""
    there = describe("8x-rtx-pro-6000d")
    device = replace(there.facts.device, dot_flops={"bfloat16": rate})
    return replace(there, facts=replace(there.facts, devices=(device,) * 8))


@cache
def planned(model: str, **wishes: Any) -> Resolved:
    intent = Intent(model=model, context=8192, **wishes)
    return eight().resolve(open_model(model), intent)


# -- laws ------------------------------------------------------------------------------------------


@cache
def _facts() -> Facts:
    return describe("1x-h200").facts


@cache
def _without(model: str, removed: tuple[str, ...] = ()) -> Resolved | None:
    """A plan with some kernels gone; reference paths may serve, and are priced. None: refused."""
    intent = Intent(model=model, context=4096)
    policy = Policy(min_evidence=Evidence.NONE, allow_fallback=frozenset({"all"}))
    try:
        return resolve(
            intent, open_model(model).facts, _facts(), REGISTRY.without(*removed), policy
        )
    except RefusedError:
        return None


@settings(max_examples=12, deadline=None)
@given(st.data(), st.sampled_from((FLASH, QWEN)))
def test_removing_a_kernel_never_speeds_a_plan_up(data: st.DataObject, model: str) -> None:
    """Neither by the kernels' own costs, which choose, nor by the predicted rates. These count the
    bytes of a layout and not its kernels: a cache that is smaller and slower may gain a trace."""
    whole = _without(model)
    assert whole is not None
    used = sorted({choice.impl.id for choice in whole.selection.bundle.choices})
    removed = data.draw(st.sets(st.sampled_from(used), min_size=1, max_size=3))
    less = _without(model, tuple(sorted(removed)))
    if less is None:
        return  # nothing is left to serve an op: no plan is not a faster plan
    before, after = whole.selection.bundle, less.selection.bundle
    assert not {choice.impl.id for choice in after.choices} & removed
    if before.seconds is not None and after.seconds is not None:
        assert after.seconds >= before.seconds
    mine, theirs = whole.chosen.prediction, less.chosen.prediction
    assert mine is not None and theirs is not None
    for rate in ("prefill_tok_s", "decode_tok_s", "one_tok_s"):
        assert getattr(theirs, rate) <= 1.005 * getattr(mine, rate)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(GOALS),
    st.sampled_from((3, 5, 6, 8)),
    st.integers(24, 96),
    st.sampled_from((FLASH, QWEN)),
)
def test_a_forbidden_layout_is_never_proposed(
    goal: str, count: int, gigabytes: int, model: str
) -> None:
    """Neither as the plan's nor as the goal's nor as a phase's."""
    facts = eight().facts
    device = replace(facts.device, memory_bytes=gigabytes * 10**9)
    there = replace(eight(), facts=replace(facts, devices=(device,) * count))
    intent = Intent(model=model, context=8192, goal=goal)
    try:
        found = there.resolve(open_model(model), intent)
    except RefusedError as error:
        assert error.reasons
        return
    facts_of = open_model(model).facts
    blocks = census(facts_of.arch, facts_of.scheme_of).blocks()
    forbidden = {
        each.layout.name
        for each in found.layouts
        if not each.feasible or not found.arch.layout_objections(each.layout, blocks).accepted
    }
    assert all(each.reasons for each in found.layouts if each.layout.name in forbidden)
    keys = ("layouts", "goal_layout", "prefill_layout", "decode_layout", "joint_layout")
    proposed = {str(d.value) for d in found.plan.decisions if d.key in keys}
    assert not proposed & forbidden and found.chosen.feasible
    for name in sorted(forbidden)[:1]:
        with pytest.raises(RefusedError):
            there.resolve(open_model(model), replace(intent, parallel=name))


# -- phases ----------------------------------------------------------------------------------------


class Fixed:
    """A feasible layout with the two rates that phases are chosen by."""

    def __init__(self, name: str, prefill: float | None, decode: float) -> None:
        self.layout = LayoutPlan(name=name)
        self.prediction: Prediction | None = Prediction(
            prefill_tok_s=prefill, decode_tok_s=decode, one_tok_s=1.0, first_token_s=1.0,
            batch=1, context=1, prompt=1, assumed=(),
        )  # fmt: skip


def phases(*judged: Fixed) -> dict[str, Any]:
    ledger = DecisionLedger()
    record_phases(ledger, judged)
    return {decision.key: decision for decision in ledger.freeze()}


def test_each_phase_has_its_own_and_both_have_the_best_for_both() -> None:
    wide, deep, even = Fixed("wide", 9000, 100), Fixed("deep", 1000, 400), Fixed("even", 6000, 380)
    found = phases(wide, deep, even)
    values = [str(found[f"{key}_layout"].value) for key in ("prefill", "decode", "joint")]
    assert values == ["wide", "deep", "even"]
    assert even.prediction is not None
    assert request_seconds(even.prediction) == pytest.approx(8192 / 6000 + ANSWER / 380)
    assert {loser.value for loser in found["joint_layout"].losers} == {"wide", "deep"}
    apart = 8192 / 9000 + ANSWER / 400
    gain = (8192 / 6000 + ANSWER / 380) / apart - 1
    assert found["phases_apart"].why.startswith(f"{gain:.0%} more than even")


def test_an_unknown_rate_leaves_its_phase_unknown() -> None:
    found = phases(Fixed("a", None, 100), Fixed("b", 5.0, 200))
    assert found["prefill_layout"].value == found["joint_layout"].value == "unknown"
    assert found["decode_layout"].value == "b" and "phases_apart" not in found
    assert found["prefill_layout"].origin is Origin.DERIVED


def test_a_plan_for_eight_cards_names_them() -> None:
    found = planned("random:deepseek-v4-flash")
    rates = {
        each.layout.name: each.prediction for each in found.layouts if each.prediction is not None
    }
    decided = {each.key: each for each in found.plan.decisions}
    for key, rate in (("prefill", "prefill_tok_s"), ("decode", "decode_tok_s")):
        best = max(rates, key=lambda name, rate=rate: getattr(rates[name], rate))  # type: ignore[misc]
        assert decided[f"{key}_layout"].value == best
    joint = min(rates, key=lambda name: request_seconds(rates[name]) or 1e9)
    assert decided["joint_layout"].value == joint


# -- one decision ----------------------------------------------------------------------------------


def test_a_decision_is_explained_with_all_that_lost() -> None:
    document = plan_document(planned("random:deepseek-v4-flash"))
    (row,) = explained(document, "decode_layout")
    text = "\n".join(explain_lines([row]))
    assert f"decode_layout = {row['value']}" in text and "set by: cost model" in text
    assert text.count("  not ") == len(row["losers"]) > 3
    (covering,) = explained(document, "limits.step_tokens.anything")
    assert covering["key"] == "limits.step_tokens"
    below = explained(document, "limits")
    assert {each["key"] for each in below} >= {"limits.step_tokens", "limits.max_context"}
    assert all(
        each["key"].startswith("ops.attn_sparse") for each in explained(document, "ops.attn_sparse")
    )


@pytest.mark.parametrize(
    ("key", "said"), [("layout", "goal_layout"), ("tokens", "kv_tokens"), ("", "lists all")]
)
def test_an_unknown_decision_names_what_sounds_alike(key: str, said: str) -> None:
    document = plan_document(planned(QWEN))
    with pytest.raises(UsageError) as caught:
        explained(document, key)
    assert said in caught.value.remedy
