"""Measured steps become prices: of known law, of recorded runs on an H200, in a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import UserError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.step import Phase
from metainfer.engine.elsewhere import describe
from metainfer.kernels.choice import Policy
from metainfer.kernels.impl import Evidence
from metainfer.ops.catalog import builtin_registry
from metainfer.planner import calibration
from metainfer.planner.amounts import Amounts
from metainfer.planner.calibration import (
    LEAST_BAND,
    Calibration,
    Sample,
    calibrate,
    calibration_from,
    fit,
    left_out,
)
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved, resolve
from metainfer.planner.steps import StepCost

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"


def law(a: Amounts) -> float:
    return 1e-3 + a.moved * 2e-12 + a.flops * 1e-14 + a.attention * 3e-14


def amounts(rows: int, context: int) -> Amounts:
    """Experts are read once more tokens meet them: bytes are no sum of the other amounts."""
    moved = 5e8 * (2 - 0.97**rows) + 2e5 * rows * context
    return Amounts(rows, 2e9 * rows, 1e6 * rows * context, moved)


GRID = [(rows, context) for rows in (1, 4, 16, 64) for context in (64, 1024, 4096)]


def test_a_law_is_found_again() -> None:
    fitted = fit([Sample(Phase.DECODE, amounts(*at), law(amounts(*at))) for at in GRID])
    assert fitted.overhead_s == pytest.approx(1e-3, rel=1e-3)
    assert fitted.byte_s == pytest.approx(2e-12, rel=1e-3)
    assert (fitted.flop_s, fitted.attention_s) == pytest.approx((1e-14, 3e-14), rel=1e-3)
    for at in ((2, 200), (200, 3000)):  # between and beyond what was measured
        assert fitted.seconds(amounts(*at)) == pytest.approx(law(amounts(*at)))


def test_what_the_line_misses_is_interpolated_over_rows() -> None:
    """A kernel that is twice as slow for 16 rows alone."""

    def bent(a: Amounts) -> float:
        return law(a) * (2.0 if a.rows == 16 else 1.0)

    fitted = fit([Sample(Phase.DECODE, amounts(*at), bent(amounts(*at))) for at in GRID])
    for rows in (1, 4, 16, 64):
        at = amounts(rows, 1024)
        assert fitted.seconds(at) == pytest.approx(bent(at), rel=0.15)
    between = fitted.seconds(amounts(32, 1024)) / law(amounts(32, 1024))
    assert 1.1 < between < 1.9


def test_collectives_are_added_as_modelled() -> None:
    sent = [replace(amounts(*at), sent=0.5) for at in GRID]
    fitted = fit([Sample(Phase.DECODE, a, law(a) + 0.5) for a in sent])
    assert fitted.seconds(amounts(4, 64)) == pytest.approx(law(amounts(4, 64)))
    assert fitted.seconds(replace(amounts(4, 64), sent=2.0)) == pytest.approx(
        law(amounts(4, 64)) + 2.0
    )


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(1, 9000), st.floats(1e-5, 10.0)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from((Phase.DECODE, Phase.CHUNK)),
)
@settings(max_examples=60, deadline=None)
def test_more_work_never_takes_less(measured: list[tuple[int, int, float]], phase: Phase) -> None:
    """Of the same rows: ratios follow what was measured over rows, whatever that was."""
    fitted = fit([Sample(phase, amounts(rows, at), s) for rows, at, s in measured])
    base = amounts(32, 512)
    more = replace(base, moved=2 * base.moved, flops=2 * base.flops, attention=3 * base.attention)
    assert 0 <= fitted.seconds(base) <= fitted.seconds(more)


def test_the_band_is_what_the_fit_owes() -> None:
    exact = [Sample(Phase.DECODE, amounts(*at), law(amounts(*at))) for at in GRID]
    assert calibrate(exact).band == LEAST_BAND
    odd = [*exact[:-1], replace(exact[-1], seconds=exact[-1].seconds * 3)]
    assert calibrate(odd).band >= 0.5
    assert calibrate(odd).band == pytest.approx(max(left_out(odd)))


def test_a_phase_that_was_not_measured_has_a_stand_in() -> None:
    found = calibrate([Sample(Phase.CHUNK, amounts(*at), law(amounts(*at))) for at in GRID])
    assert found(Phase.MIXED, amounts(16, 64)) == pytest.approx(law(amounts(16, 64)))
    assert found(Phase.DECODE, amounts(1, 64)) > 0


def test_steps_that_wait_for_their_host_say_nothing_of_the_line() -> None:
    """Chunks of 400 launches at 0.1 ms: short ones take 40 ms, whatever they compute."""
    grid = [(rows, at) for rows in (16, 256, 4096, 16384, 65536) for at in (64, 1024, 4096)]
    eager = [replace(amounts(*at), launches=400.0) for at in grid]
    measured = [Sample(Phase.CHUNK, a, max(law(a), 0.04)) for a in eager]
    assert {each.seconds > 0.04 for each in measured} == {True, False}
    fitted = fit(measured, 1e-4)
    assert fitted.launch_s == 1e-4
    for sample in measured:
        assert fitted.seconds(sample.amounts) == pytest.approx(sample.seconds)
    replayed = replace(eager[0], launches=0.0)
    assert fitted.seconds(replayed) < 0.02 < fitted.seconds(eager[0])
    found = calibrate(measured, launch_s=1e-4)
    assert found.phases[Phase.CHUNK] == fitted and found.band == LEAST_BAND


def test_a_launch_costs_no_more_than_the_quickest_measured_step_allows() -> None:
    """The seed is of slower hosts; one that launched 400 in 20 ms needs 50 us for each."""
    quick = replace(amounts(16, 64), launches=400.0)
    long = replace(amounts(4096, 64), launches=400.0)
    measured = [Sample(Phase.CHUNK, quick, 0.02), Sample(Phase.CHUNK, long, law(long))]
    fitted = fit(measured, 9e-5)
    assert fitted.launch_s == pytest.approx(5e-5)
    assert fitted.seconds(quick) == pytest.approx(0.02)
    assert fit(measured[:1], 9e-5).seconds(quick) == pytest.approx(0.02)  # nothing else to fit


def test_a_record_of_before_launches_knows_none() -> None:
    found = calibrate([Sample(Phase.CHUNK, amounts(*at), law(amounts(*at))) for at in GRID])
    body = found.to_json()
    for fit_of in body["phases"].values():
        assert fit_of.pop("launch_s") == 0.0
    assert calibration_from(body) == found


def test_a_record_comes_back_and_a_damaged_one_is_told() -> None:
    found = calibrate([Sample(Phase.CHUNK, amounts(*at), law(amounts(*at))) for at in GRID])
    assert calibration_from(json.loads(json.dumps(found.to_json()))) == found
    for bad in (None, {}, {"phases": {"walk": {}}}, {**found.to_json(), "phases": {}}):
        with pytest.raises(UserError, match=r"cannot be read|is empty"):
            calibration_from(bad)
    with pytest.raises(UserError, match="no step times"):
        calibrate([])


# -- recorded runs ---------------------------------------------------------------------------------

QWEN_8B, V4 = "random:qwen3-8b", "random:deepseek-v4-flash?layers=12"
RUNS = {
    QWEN_8B: ("2026-11-29-h200-check.json", "speed", 4096),
    V4: ("2026-11-30-h200-v4-engine.json", "rows", 8192),
}
LONG = "2026-11-30-h200-v4-long.json"
"""Prompts of DeepSeek-V4 up to a million tokens, chunk by chunk, by the same kernels."""


@cache
def cost_on_h200(model: str, chunk: int) -> StepCost:
    intent = Intent(model=model, context=34_816, concurrency=128, chunk_tokens=chunk)
    found = describe("1x-h200", intent).resolve(open_model(model), intent).chosen.cost
    assert found is not None
    return found


def sample(cost: StepCost, row: str, seconds: float, chunk: int) -> Sample:
    """A recorded row as a sample; of a prompt in several chunks, the mean chunk."""
    words = row.replace(",", "").split()
    if words[0] == "decode":
        batch, context = int(words[2]), int(words[4])
        return Sample(Phase.DECODE, cost.runs([(context, 1)] * batch, scored=batch), seconds)
    times, tokens = (int(words[1]), int(words[3])) if "x" in words else (1, int(words[1]))
    starts = [start for _ in range(times) for start in range(0, tokens, chunk)]
    each = [
        cost.runs([(s, min(chunk, tokens - s))], scored=int(s + chunk >= tokens)) for s in starts
    ]
    mean = Amounts(
        each[0].rows,
        *(sum(getattr(a, f) for a in each) / len(each) for f in ("flops", "attention", "moved")),
    )
    return Sample(Phase.CHUNK, mean, seconds / len(each))


def recorded(model: str) -> list[tuple[str, Sample]]:
    name, key, chunk = RUNS[model]
    rows = json.loads((RECORDS / name).read_text())[key]
    cost = cost_on_h200(model, chunk)
    found = [(row["row"], sample(cost, row["row"], row["median_s"], chunk)) for row in rows]
    return found + (long_chunks(cost, chunk) if model == V4 else [])


def long_chunks(cost: StepCost, chunk: int) -> list[tuple[str, Sample]]:
    """Single chunks of the long prompts; the last of each ran under the profiler."""
    found = []
    for prompt in json.loads((RECORDS / LONG).read_text())["contexts"]:
        whole = range(len(prompt["chunks_s"]) - 1)
        for number in (n for n in (7, 31, 63, 127) if n in whole):
            work = cost.runs([(number * chunk, chunk)], scored=0)
            row = f"chunk {number} of {prompt['tokens']} tokens"
            found.append((row, Sample(Phase.CHUNK, work, prompt["chunks_s"][number])))
    return found


@pytest.mark.parametrize("model", RUNS)
def test_recorded_rows_within_15_percent_from_the_others(model: str) -> None:
    """Each row of a phase from the other rows of that phase."""
    rows = recorded(model)
    for phase in (Phase.DECODE, Phase.CHUNK):
        of_phase = [(row, each) for row, each in rows if each.phase is phase]
        errors = left_out([each for _, each in of_phase])
        for (row, _), error in zip(of_phase, errors, strict=True):
            assert error <= 0.15, (row, f"{error:.1%}")


def test_few_prompts_do_not_make_products_free() -> None:
    """Fitted apart, all of four lone prompts went to attention, and a chunk of four short ones cost
    0.7 of one long one; over two cards it was 0.96."""
    lone = [
        each
        for row, each in recorded(V4)
        if row.startswith("prefill") and each.amounts.rows <= 8192 and "16384" not in row
    ]
    assert len(lone) == 4
    cost, price = cost_on_h200(V4, 8192), fit(lone)
    short, long = cost.prefill(8192, 2048), cost.prefill(8192, 8192)
    assert price.seconds(short) > 0.9 * price.seconds(long)


# -- in a plan -------------------------------------------------------------------------------------

QWEN = "random:qwen3-8b?layers=2"


def planned(measured: Any, without: tuple[str, ...] = ()) -> Resolved:
    facts = describe("1x-h200").facts
    policy = Policy(min_evidence=Evidence.NONE, allow_fallback=frozenset({"all"}))
    registry = builtin_registry().without(*without)
    intent = Intent(model=QWEN, context=4096)
    return resolve(intent, open_model(QWEN).facts, facts, registry, policy, measured=measured)


def test_a_plan_says_what_was_measured_and_its_band_shrinks() -> None:
    asked: list[str] = []

    def measured(key: str) -> Calibration | None:
        asked.append(key)
        samples = [Sample(p, amounts(*at), law(amounts(*at))) for p in Phase for at in GRID]
        return calibrate(samples, origin="bench calibrate, today")

    plain, known = planned(calibration.nothing_measured), planned(measured)
    before, after = plain.chosen.prediction, known.chosen.prediction
    assert before is not None and after is not None
    assert (before.calibrated, after.calibrated) == ("", "bench calibrate, today")
    assert before.band == (0.4, 2.0) and after.band == (1 / 1.1, 1.1)
    (speed,) = [each for each in known.plan.decisions if each.key == "speed"]
    assert speed.origin is Origin.RECORD and "bench calibrate, today; within 10%" in speed.why
    (speed,) = [each for each in plain.plan.decisions if each.key == "speed"]
    assert speed.origin is Origin.COST_MODEL and "0.4 to 2" in speed.why
    assert known.plan.fingerprint == plain.plan.fingerprint  # speed is no decision of the plan's


def test_another_kernel_is_another_key() -> None:
    asked: list[str] = []

    def measured(key: str) -> None:
        asked.append(key)

    first = planned(measured)
    used = first.plan.ops["swiglu@decode"].impl
    planned(measured)
    planned(measured, without=(used,))
    assert asked[0] == asked[1] != asked[2]
