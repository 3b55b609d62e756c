"""`bench ladder`: holds that name what exists, gains that are ratios of pairs, answers checked."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import pytest

from metainfer.bench import ladder
from metainfer.bench.ladder import TWO_ENGINES, LadderOptions, gain_row, run, text
from metainfer.bench.ladder_picture import picture
from metainfer.bench.offline import EngineSide
from metainfer.bench.profiles import DAY_0, Rung, climbable, holding
from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.plan import LayoutPlan
from metainfer.engine.elsewhere import describe
from metainfer.ops.catalog import builtin_registry
from metainfer.planner.opening import open_model

SHORT = LadderOptions(
    prompt_tokens=9, output_tokens=3, batches=(1, 2), prefill_tokens=40, repeats=2
)
MODEL = "random:tiny-llama"


@pytest.fixture(scope="module")
def climbed() -> dict[str, Any]:
    return run(Intent(model=MODEL), SHORT, lambda line: None)


def test_every_hold_names_an_implementation_or_a_layout_that_exists() -> None:
    registry = builtin_registry()
    impls = {impl.id for impl in registry.impls()}
    layouts = {
        (role, layout.id)
        for role in ("weight", "experts", "kv", "index")
        for layout in registry.layouts(role)
    }
    for rungs in DAY_0.values():
        assert len({rung.name for rung in rungs}) == len(rungs)
        for rung in rungs:
            assert {f"{op}/{impl}" for op, impl in rung.ops.items()} <= impls, rung.name
            assert set(rung.layouts.items()) <= layouts, rung.name
            assert rung.stock and (rung.ops or rung.layouts or rung.settings)


def test_a_ladder_has_every_rung_twice_and_both_ends(climbed: dict[str, Any]) -> None:
    loads = ["decode, batch 1", "decode, batch 2", "prefill, 40 tokens"]
    rungs = climbed["rungs"]
    assert [row["rung"] for row in rungs] == [
        rung.name for rung in DAY_0["cpu"] if rung.name not in _absent(climbed)
    ]
    for row in rungs:
        for part in ("cumulative", "left_out"):
            assert [gain["load"] for gain in row[part]] == loads
            assert all(gain["n"] == 2 and gain["gain"] > 0 for gain in row[part])
    assert [gain["load"] for gain in climbed["total"]] == loads
    # The baseline first, then one engine per rung, one per rung left out but the last, the first.
    held = [row["without"] for row in climbed["verification"]]
    names = [row["rung"] for row in rungs]
    assert held[0] == held[-1] == ", ".join(names)
    assert held[len(names)] == "nothing" and held[len(names) + 1 : -1] == names[:-1]
    assert all(row["worst"] < 1e-3 for row in climbed["verification"])
    for row in rungs:
        assert row["rung"] in text(climbed)


def _absent(document: dict[str, Any]) -> set[str]:
    return {row["rung"] for row in document["absent"]}


def test_the_picture_is_xml_with_a_bar_for_every_rung_and_load(climbed: dict[str, Any]) -> None:
    root = ElementTree.fromstring(picture(climbed))
    bars = [node for node in root.iter() if node.get("class") == "b"]
    assert len(bars) == len(climbed["rungs"]) * len(climbed["total"])
    assert all(float(bar.get("width", "nan")) > 0 for bar in bars)


def test_an_engine_that_answers_otherwise_is_refused_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = EngineSide.logprobs
    asked = []

    def off(self: EngineSide, prompt: list[int]) -> list[float]:
        asked.append(1)
        found = real(self, prompt)
        return [*found[:-1], found[-1] + (0.01 if len(asked) == 2 else 0.0)]

    def timed(*args: object) -> list[float]:
        raise AssertionError("timed before it was checked")

    monkeypatch.setattr(EngineSide, "logprobs", off)
    monkeypatch.setattr(ladder, "gain_row", timed)
    with pytest.raises(RefusedError, match="answers otherwise than the baseline"):
        run(Intent(model=MODEL), SHORT, lambda line: None)
    assert len(asked) == 2


def test_a_gain_is_the_median_of_ratios_of_neighbours() -> None:
    """A machine that slows down by half meanwhile changes no ratio, though it changes medians."""
    row = gain_row("x", [10.0, 20.0, 40.0, 80.0, 160.0], [15.0, 30.0, 60.0, 120.0, 240.0])
    assert row["gain"] == 1.5 and row["interval"] == [1.5, 1.5] and row["n"] == 5
    mixed = gain_row("x", [10.0, 10.0, 10.0], [10.0, 20.0, 30.0])
    assert mixed["gain"] == 2.0 and mixed["interval"] == [1.0, 3.0]


def test_what_the_user_pinned_stays_and_holds_are_marked_as_ours() -> None:
    rung = Rung(name="r", stock="s", ops={"rope": "torch", "swiglu": "torch"}, layouts={"kv": "a"})
    intent = holding(Intent(model=MODEL, ops={"rope": "c"}), [rung])
    assert intent.ops == {"rope": "c", "swiglu": "torch"} and intent.layouts == {"kv": "a"}
    assert intent.origin("layouts") is Origin.DERIVED


def test_a_rung_that_the_plan_takes_of_its_own_accord_is_absent() -> None:
    """And so is one for an op that the model has not, and a setting that only ranks have."""
    intent = Intent(model=MODEL, prefix_cache=False)
    _, found = ladder._Ladder(intent, SHORT, lambda line: None).footing()
    mine = {rung.name: rung for rung in found}
    assert mine["attention over pages"].ops and not mine["attention over pages"].absent
    pinned = replace(intent, ops={"attn_paged": "torch"})
    plan, found = ladder._Ladder(pinned, SHORT, lambda line: None).footing()
    assert {rung.name: rung for rung in found}["attention over pages"].absent
    for rung in (
        Rung(name="r", stock="s", ops={"attn_sparse": "torch"}),
        Rung(name="r", stock="s", settings={"collectives": "nccl"}),
    ):
        (cut,) = climbable([rung], plan)
        assert cut.absent and not cut.ops and not cut.settings
    several = LayoutPlan(name="2x", data=2), LayoutPlan(name="tp2", tensor=2)
    cuts = [climbable([rung], replace(plan, layouts=(each,)))[0] for each in several]
    assert [bool(cut.settings) for cut in cuts] == [False, True]  # replicas send nothing


def test_a_kind_of_device_without_a_profile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "DAY_0", {"cuda": DAY_0["cuda"]})
    with pytest.raises(UsageError, match="no day-0 profile is described for cpu, only for cuda"):
        run(Intent(model=MODEL), SHORT, lambda line: None)


def test_without_any_rung_the_reasons_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "climbable", lambda rungs, plan: [
        replace(rung, absent="not here") for rung in rungs
    ])  # fmt: skip
    with pytest.raises(UsageError, match="no rung of the day-0 profile stands here"):
        run(Intent(model=MODEL), SHORT, lambda line: None)


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        ("1x-h200", ["experts in FP8", "FP8 linear layers", "sparse attention for the card",
                     "streams and routing, fused", "small ops, fused"]),
        ("8x-rtx-pro-6000d", ["experts in FP8", "FP8 linear layers", "streams and routing, fused",
                              "small ops, fused"]),
    ],
)  # fmt: skip
def test_deepseek_v4_has_a_day_0_on_cards(machine: str, names: list[str]) -> None:
    """Its rungs in the order of the published stages, kernels before fusions; all holds together
    make a plan that fits beside the finished engine."""
    wish = Intent(
        model="random:deepseek-v4-flash?layers=6", context=2049, concurrency=8, parallel="single",
        memory_share=TWO_ENGINES,
    )  # fmt: skip
    described, model = describe(machine, wish), open_model(wish.model)
    rungs = climbable(DAY_0["cuda"], described.resolve(model, wish).plan)
    assert [rung.name for rung in rungs if not rung.absent] == names
    held = described.resolve(model, holding(wish, rungs)).plan
    assert {op.impl for key, op in held.ops.items() if key.startswith("moe_experts")} == {
        "moe_experts/triton-bf16"
    }
    assert held.bundle["weight"] == "dense@1"


def test_random_weights_are_judged_by_the_spread_of_their_answers() -> None:
    """Rounding alone moves these; answers of another model stand further off."""
    noise = random.Random(4)
    truth, other = ([noise.gauss(-12.0, 1.0) for _ in range(400)] for _ in range(2))
    near = [value + noise.gauss(0.0, 0.25) for value in truth]
    judge = ladder._Ladder(Intent(model="random:x"), SHORT, lambda line: None)
    judge.check(truth, "bfloat16", "all")
    judge.check(near, "bfloat16", "some")
    with pytest.raises(RefusedError, match="answers otherwise"):
        judge.check(other, "bfloat16", "none")
    real = ladder._Ladder(Intent(model="real"), SHORT, lambda line: None)
    real.check(truth, "bfloat16", "all")
    with pytest.raises(RefusedError, match="answers otherwise"):
        real.check(near, "bfloat16", "some")
