"""`bench serve` against a server that it starts, and `simulate --compare` beside what came out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metainfer.bench.own_server import own_server
from metainfer.cli.main import run
from metainfer.core.errors import UserError

SHARED = "shared:concurrency=2,requests=4,prefix=64,groups=1,prompt=8,output=6"


def test_a_server_that_does_not_start_is_told_with_its_exit_code(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="ended with exit code 1 before it was ready"),
        own_server([str(tmp_path / "no model")], lambda line: None),
    ):
        pass


@pytest.mark.timeout(600)
def test_a_real_server_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path / "cache"))
    engine = ("--platform", "cpu", "--context", "256", "--concurrency", "2")
    model = "random:tiny-llama?layers=1"
    code = run(["bench", "serve", model, *engine, "--workload", SHARED, "--repeats", "2", "--json"])
    out, err = capfd.readouterr()
    assert code == 0, err
    found = json.loads(out)
    assert found["n"] == 2 and found["model"] == model
    for row in found["runs"]:
        assert (row["requests"], row["output_tokens"], row["contaminated"]) == (4, 24, [])
        assert row["cached_tokens"] > 0 and row["steps"] >= 6
        assert 0 < row["ttft_s"]["p50"] <= row["ttft_s"]["p95"]
    assert found["conditions"]["limits"]["max_context"] == 256
    path = tmp_path / "measured.json"
    path.write_text(out)
    code = run(["simulate", "--model", model, *engine, "--compare", str(path), "--json"])
    compared = json.loads(capfd.readouterr().out)
    assert code in (0, 1) and {"output_tok_s", "ttft_s.p95"} <= set(compared["comparison"])
    assert compared["hit_rate"] == pytest.approx(2 * 64 / (4 * 72))  # the first two meet nothing
