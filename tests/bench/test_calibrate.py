"""Steps of a real engine become a record that the next plan is priced with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metainfer.bench import calibrate, capacity, path
from metainfer.bench.calibrate import CalibrateOptions, Load, _loads, run
from metainfer.bench.client import Server
from metainfer.core.errors import RefusedError, UserError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.step import Phase
from metainfer.engine.elsewhere import describe
from metainfer.engine.engine import Engine
from metainfer.engine.machine import open_machine
from metainfer.planner.amounts import Amounts
from metainfer.planner.candidate import Candidate
from metainfer.planner.opening import open_model
from metainfer.simulator.outcome import Served
from metainfer.simulator.workload import Workload

INTENT = Intent(
    model="random:tiny-llama?layers=1", platform="cpu", context=128, concurrency=4, chunk_tokens=48
)

CARDS = "2x-h200-nop2p"


def planned() -> Any:
    return open_machine("cpu").resolve(open_model(INTENT.model), INTENT)


def test_a_calibration_is_measured_kept_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path))
    before, begun = planned(), []

    @contextmanager
    def server() -> Iterator[Server]:
        begun.append("up")
        yield Server("nowhere", 0)
        begun.append("down")

    async def added(server: Server, price: Any, cost: Any, running: int, seed: int) -> path.Path:
        begun.append(f"{server.host} {running}")
        return path.Path(0.25, 0.125)

    monkeypatch.setattr(path, "measure", added)
    monkeypatch.setattr(calibrate, "launch_seconds", {"cpu": 1e-9}.__getitem__)  # by the device
    found = run(INTENT, CalibrateOptions(repeats=1), lambda text: None, server)
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
    assert {each.launch_s for each in kept.phases.values()} == {1e-9}
    assert begun == ["up", "nowhere 4", "down"]
    assert (kept.request_s, kept.token_s) == (0.25, 0.125)


def not_started(self: Engine) -> None:
    raise AssertionError("an engine was started")


@pytest.mark.parametrize("measure", ["calibrate", "capacity"])
@pytest.mark.parametrize(
    ("machine", "intent", "layout", "remedy"),
    [
        ("", replace(INTENT, parallel="tp2"), "tp2", "one rank (--parallel single)."),
        (
            CARDS,
            Intent(model="random:deepseek-v4-flash"),
            "ep2",
            "There is nothing to measure here",
        ),
        (
            CARDS,
            Intent(model="random:qwen3-8b?layers=290", context=40960, concurrency=2),
            "tp2",
            "Measure within limits that one device holds: Lower --context",
        ),
    ],
    ids=["asked for", "weights", "cache"],
)
def test_several_ranks_are_refused_before_anything_is_loaded(
    measure: str,
    machine: str,
    intent: Intent,
    layout: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what can be done about it, which is not the same where no single device holds it."""
    monkeypatch.setattr(Engine, "start", not_started)
    if machine:
        described = describe(machine)
        for module in (calibrate, capacity):
            monkeypatch.setattr(module, "open_machine", lambda platform: described)
    with pytest.raises(RefusedError, match=f"steps of {layout} run on several ranks") as told:
        if measure == "calibrate":
            run(intent, CalibrateOptions(), lambda text: None)
        else:
            capacity.run(intent, capacity.CapacityOptions(), lambda text: None)
    assert told.value.code == "several_ranks" and remedy in told.value.remedy
    assert ("No single device" in told.value.cause) == bool(machine)


def test_a_family_without_a_cost_model_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Engine, "start", not_started)
    made = Candidate.__init__
    monkeypatch.setattr(Candidate, "__init__", lambda *a, **k: made(*a, **{**k, "cost": None}))
    with pytest.raises(RefusedError, match="no cost model") as told:
        run(INTENT, CalibrateOptions(), lambda text: None)
    assert "nothing to calibrate" in told.value.remedy


def test_what_a_server_adds_is_what_steps_do_not_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone first token after 50 ms, 40 of them a step; gaps of 36 ms for four answers, of which
    20 are a step."""

    async def sent(server: Server, model: str, load: Workload) -> list[Served]:
        if load.concurrency == 1:
            assert load.longest == path.PROMPT + 1 and len(load.jobs) == path.LONE
            return [Served(float(i), 32, [i + 0.05], [1]) for i in range(path.LONE)]
        count = load.concurrency
        assert count == 4
        together = [30 + 0.036 * n for n in range(10)]  # before that, not all are under way
        ends = [[0.5 * n for n in range(30)] + together] * (count - 1) + [together]
        return [Served(0.0, 32, times, [1] * len(times)) for times in ends]

    async def models(self: Server, where: str) -> str:
        return '{"data": [{"id": "m"}]}'

    monkeypatch.setattr(path, "send", sent)
    monkeypatch.setattr(Server, "get", models)
    cost = planned().chosen.cost
    assert cost is not None

    def price(phase: Phase, amounts: Amounts) -> float:
        assert amounts.rows == (32 if phase is Phase.CHUNK else 4)
        return 0.04 if phase is Phase.CHUNK else 0.02

    found = asyncio.run(path.measure(Server("nowhere", 0), price, cost, 4, 1))  # type: ignore[arg-type]
    assert found.request_s == pytest.approx(0.01) and found.token_s == pytest.approx(0.004)

    def slow(phase: Phase, amounts: Amounts) -> float:
        return 9.0

    found = asyncio.run(path.measure(Server("nowhere", 0), slow, cost, 4, 1))  # type: ignore[arg-type]
    assert found == path.Path(0.0, 0.0)


@pytest.mark.parametrize("each", [Served(0.0, 32, error="full"), Served(0.0, 32)])
def test_a_request_that_fails_is_not_a_server_that_adds_nothing(
    each: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sent(server: Server, model: str, load: Workload) -> list[Served]:
        return [Served(0.0, 32, [0.05], [1]), each]

    async def models(self: Server, where: str) -> str:
        return '{"data": [{"id": "m"}]}'

    monkeypatch.setattr(path, "send", sent)
    monkeypatch.setattr(Server, "get", models)
    cost = planned().chosen.cost
    assert cost is not None
    with pytest.raises(UserError, match=r"did not answer: (full|no token came)"):
        asyncio.run(path.measure(Server("nowhere", 0), lambda *_: 0.0, cost, 4, 1))  # type: ignore[arg-type]


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
