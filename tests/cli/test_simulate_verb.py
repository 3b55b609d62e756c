"""`simulate` on the command line: a described machine, curves, a comparison, and bad wishes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from metainfer.cli.main import run
from metainfer.cli.simulate import CONDITIONS

WORK = "closed:concurrency=2,requests=4,prompt=50,output=5"
BASE = ("simulate", "--model", "random:tiny-llama", "--machine", "1x-h200", "--context", "256")


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Exit code, standard output and standard error of one command line."""

    def go(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(words)
        return code, *capfd.readouterr()

    return go


def simulated(command: Command, *words: str) -> dict[str, Any]:
    code, out, _ = command(*BASE, *words, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_one_load_and_a_curve(command: Command) -> None:
    found = simulated(command, "--workload", WORK, "--seed", "3")
    assert (found["requests"], found["output_tokens"], found["calibrated"]) == (4, 20, False)
    assert found["band"] == [0.4, 2.0] and found["speed"].startswith("cost model")
    assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p95"]
    assert found == simulated(command, "--workload", WORK, "--seed", "3")  # no clock but its own
    rows = simulated(command, "--workload", WORK, "--curve", "1", "--curve", "4")["curve"]
    assert [row["concurrency"] for row in rows] == [1, 4]
    assert rows[1]["output_tok_s"] > rows[0]["output_tok_s"]


def test_b36_a_comparison_states_the_error_and_wants_conditions(
    tmp_path: Path, command: Command
) -> None:
    ours = simulated(command, "--workload", WORK)
    record = {
        "workload": WORK,
        "seed": 0,
        "measured": {
            "output_tok_s": ours["output_tok_s"] / 1.1,
            "ttft_s": {"p50": ours["ttft_s"]["p50"] * 2, "p95": ours["ttft_s"]["p95"]},
        },
        "spread": {"output_tok_s": 0.01, "ttft_s.p50": 0.02, "ttft_s.p95": 0.0},
        "conditions": dict.fromkeys(CONDITIONS, 1),
    }
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(record))
    code, out, _ = command(*BASE, "--compare", str(path), "--json")
    found = json.loads(out)
    assert code == 1 and not found["ok"]
    rows = found["comparison"]
    assert rows["output_tok_s"]["ok"] and rows["output_tok_s"]["error"] == pytest.approx(0.1)
    assert not rows["ttft_s.p50"]["ok"] and rows["ttft_s.p50"]["error"] == pytest.approx(-0.5)
    record["spread"]["ttft_s.p50"] = 0.3  # twice a spread that large allows it
    path.write_text(json.dumps(record))
    code, out, _ = command(*BASE, "--compare", str(path))
    assert code == 0 and "ttft_s.p50" in out and "OFF" not in out
    del record["conditions"]["machine"]  # B-36: a figure without its conditions is none
    path.write_text(json.dumps(record))
    code, out, _ = command(*BASE, "--compare", str(path))
    assert code == 1 and out.rstrip().endswith("does not say machine")
    path.write_text(json.dumps(record | {"conditions": None}))
    assert command(*BASE, "--compare", str(path))[0] == 1


def test_the_draws_that_were_measured_are_those_simulated(tmp_path: Path, command: Command) -> None:
    """Medians over the clean repeats' own requests: one draw alone is another workload."""
    load = "closed:concurrency=2,requests=6,prompt=5-200,output=2-40"
    runs = {seed: simulated(command, "--workload", load, "--seed", str(seed)) for seed in range(5)}
    whole = {seed: run["e2e_s"]["p50"] for seed, run in runs.items()}
    assert len(set(whole.values())) == 5
    record = {
        "workload": load,
        "seed": 0,
        "runs": [{"seed": seed, "contaminated": ["busy"] if seed == 1 else []} for seed in runs],
        "measured": {"e2e_s": {"p50": median(whole[seed] for seed in (0, 2, 3, 4))}},
        "spread": {"e2e_s.p50": 0.0},
        "conditions": dict.fromkeys(CONDITIONS, 1),
    }
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(record))
    code, out, _ = command(*BASE, "--compare", str(path), "--json")
    found = json.loads(out)
    assert code == 0 and found["seeds"] == [0, 2, 3, 4]
    assert found["comparison"]["e2e_s.p50"]["error"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate",), "No model is given"),
        ((*BASE, "--workload", "burst"), "workload 'burst' is not known"),
        ((*BASE, "--workload", "poisson:rate=1", "--curve", "2"), "--curve needs a closed loop"),
        ((*BASE, "--acceptance", "1"), "--acceptance is 1"),
        ((*BASE, "--compare", "/does/not/exist"), "cannot be read"),
        ((*BASE, "--workload", "closed:concurrency=1,prompt=900"), "request 0 of the workload"),
        (
            ("simulate", "--model", "random:tiny-llama", "--machine", "8x-rtx-pro-6000d"),
            "matrix rate of RTX 6000D is unknown",
        ),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    words: tuple[str, ...], said: str, command: Command
) -> None:
    code, _, err = command(*words)
    assert code in (1, 2) and said in err
    assert err.strip().count("\n") == 0 and "Traceback" not in err
