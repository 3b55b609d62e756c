"""Steps of a real engine become a record that the next plan is priced with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metainfer.bench.calibrate import CalibrateOptions, Load, _loads, run
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.engine.machine import open_machine
from metainfer.planner.opening import open_model

INTENT = Intent(
    model="random:tiny-llama?layers=1", platform="cpu", context=128, concurrency=4, chunk_tokens=48
)


def planned() -> Any:
    return open_machine("cpu").resolve(open_model(INTENT.model), INTENT)


def test_a_calibration_is_measured_kept_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path))
    before = planned()
    found = run(INTENT, CalibrateOptions(repeats=1), lambda text: None)
    rows: Any = found["samples"]
    assert {row["phase"] for row in rows} == {"chunk", "decode", "mixed"}
    decodes = [row["rows"] for row in rows if row["phase"] == "decode"]
    assert set(decodes) == {1, 2, 4}
    assert max(row["rows"] for row in rows if row["phase"] == "chunk") == 48
    assert all(row["seconds"] > 0 and row["fitted_s"] > 0 for row in rows)
    after = planned()
    assert after.plan.fingerprint == before.plan.fingerprint
    origins = [
        next(d.origin for d in each.plan.decisions if d.key == "speed") for each in (before, after)
    ]
    assert origins == [Origin.COST_MODEL, Origin.RECORD]
    kept = after.chosen.calibration
    assert kept is not None and kept.to_json() == found["calibration"]
    assert kept.origin.startswith("bench calibrate, ")


def test_a_dry_run_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path))
    run(INTENT, CalibrateOptions(repeats=1, keep=False), lambda text: None)
    assert planned().chosen.calibration is None


@pytest.mark.parametrize(
    "limits", [(64, 2, 16, 8), (2048, 32, 1024, 128), (131_072, 64, 4096, 512)]
)
def test_loads_stay_within_the_plan(limits: tuple[int, int, int, int]) -> None:
    context, running, _, _ = limits
    loads = list(_loads(*limits))
    assert {load.decodes for load in loads} >= {0, 1, 2}
    for load in loads:
        assert isinstance(load, Load) and load.decodes <= running
        assert load.prompt + load.answer <= context
        assert all(tokens + 1 < context for tokens in load.late)
