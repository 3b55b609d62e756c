"""A verdict belongs to the plan that it proved; whoever starts another one is told what changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planting import SEED, machine_with

from metainfer.cli import main
from metainfer.cli.start_screen import summary
from metainfer.core.intent import Intent
from metainfer.engine import verdicts
from metainfer.engine.machine import Machine
from metainfer.engine.protocol import EngineInfo
from metainfer.planner.opening import open_model
from metainfer.server.metrics_facts import facts
from metainfer.verifier.checks import repeat
from metainfer.verifier.rows import NOT_APPLICABLE
from metainfer.verifier.run import verify

MODEL = "random:tiny-mistral"


def plan_of(machine: Machine, **wish: Any) -> Any:
    intent = Intent(model=MODEL, **{"threads": 1, "context": 160, "concurrency": 8, **wish})
    return machine.resolve(open_model(MODEL), intent).plan


def test_captured_steps_of_ranks_are_not_compared_with_themselves() -> None:
    """Nobody tells ranks in other processes to run op by op: a pass would say nothing."""
    ranks: Any = SimpleNamespace(graph_buckets=(1, 2), layouts=(SimpleNamespace(ranks=2),))
    subject: Any = SimpleNamespace(plan=ranks)
    (row,) = repeat.graphs(subject)
    assert row.verdict == NOT_APPLICABLE and "op by op" in row.detail


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return machine_with({}, tmp_path)


def test_a_verified_plan_says_so_and_another_says_what_changed(machine: Machine) -> None:
    """The whole of `verify` on a right machine, drafts and all."""
    plan = plan_of(machine, draft="ngram:3")
    assert verdicts.status(machine.store, plan)["text"] == "not verified: run metainfer verify"
    intent = Intent(model=MODEL, threads=1, context=160, concurrency=8, draft="ngram:3")
    said: list[str] = []
    document = verify(intent, said.append, seed=SEED, machine=machine)
    wrong = [row for row in document["checks"] if row["verdict"] == "failed"]
    assert document["verdict"] == "passed", wrong
    assert {row["check"] for row in document["checks"]} >= {
        "tokenizer", "template", "ops", "ops in place", "end to end", "answers", "invariance",
        "determinism", "graphs", "speculation", "ranks", "memory",
    }  # fmt: skip
    for row in document["checks"]:
        if row["error"] is not None and row["verdict"] == "passed":
            assert row["error"] <= row["tolerance"] and row["reference"] and row["candidate"]
    tight = next(row for row in document["checks"] if row["what"] == "chunks and preemption")
    assert tight["verdict"] == "passed"
    assert said and document["named"] == []

    found = verdicts.status(machine.store, plan)
    assert found["verified"] is True and found["plan"] == plan.fingerprint
    assert found["text"].startswith("verified on 20") and found["text"].endswith(": passed")
    larger = plan_of(machine, draft="ngram:3", concurrency=4)
    assert verdicts.status(machine.store, larger)["verified"] is True  # sizes prove nothing
    other = verdicts.status(machine.store, plan_of(machine))
    assert other["verified"] is False and other["changed"] == ["kernels", "drafts"]
    assert other["text"].startswith("not verified: kernels, drafts changed; verified on 20")


def test_a_failed_verdict_is_shown_as_such(machine: Machine) -> None:
    plan = plan_of(machine)
    verdicts.keep(machine.store, plan, False, ["ops: rope/c"], 1)
    found = verdicts.status(machine.store, plan)
    assert found["verified"] is False and "failed (ops: rope/c)" in found["text"]
    verdicts.keep(machine.store, plan, True, [], 2)
    assert verdicts.status(machine.store, plan)["verified"] is True


def test_start_summary_and_metrics_show_it() -> None:
    info = EngineInfo(
        model=MODEL, vocab_size=10, max_context=64, kv_tokens=640, max_running=4,
        eos_token_ids=(), plan={"verification": {"verified": False, "text": "not verified: x"}},
    )  # fmt: skip
    assert "  not verified: x" in summary(info, "http://here", ("m",))
    families = {family.name: family for family in facts("m", info, "f")}
    (sample,) = families["metainfer_plan_verified"].samples
    assert sample.value == 0.0
    bare = EngineInfo(
        model=MODEL, vocab_size=10, max_context=64, kv_tokens=640, max_running=4,
        eos_token_ids=(), plan={},
    )  # fmt: skip
    silent = {family.name: family for family in facts("m", bare, "f")}
    assert silent["metainfer_plan_verified"].samples == []


@pytest.mark.parametrize(("verdict", "code"), [("passed", 0), ("failed", 1)])
def test_the_exit_code_is_the_verdict(
    verdict: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    document = {
        "verdict": verdict, "checks": [], "named": [], "seconds": 1.0, "plan": "f", "seed": 1,
    }  # fmt: skip
    monkeypatch.setattr("metainfer.verifier.run.verify", lambda *args, **kwargs: document)
    assert main.run(["verify", MODEL, "--seed", "1"]) == code
    assert verdict in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["verify"], "No model is given."),
        (["verify", MODEL, "--bringup"], "--bringup takes no model."),
        (["verify", MODEL, "--report", "x.json"], "--report belongs to --bringup."),
        (["verify", "--bringup", "--time-limit", "0"], "--time-limit is 0."),
    ],
)
def test_bad_usage_is_one_line(
    words: list[str], cause: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.run(words) == 2
    assert cause in capfd.readouterr().err
