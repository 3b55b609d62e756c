"""Peaks are counted, kept, and what the next plan splits memory by."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from metainfer.bench.capacity import CapacityOptions, _captured, _DeviceMemory, _on_device, run
from metainfer.cli.tune import capacity_text
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.plan import LedgerRow, StepGraph
from metainfer.core.step import Phase, RankTokens, Segment, TokenRun
from metainfer.engine.machine import open_machine
from metainfer.executor.peaks import peaks
from metainfer.kernels.evidence import Qualification
from metainfer.planner.needs import needs_from
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved

INTENT = Intent(
    model="random:tiny-llama?layers=1", platform="cpu", context=128, concurrency=3, chunk_tokens=48
)


def planned(intent: Intent = INTENT) -> Resolved:
    return open_machine("cpu").resolve(open_model(intent.model), intent)


def test_a_peak_is_what_was_in_use_at_once() -> None:
    """Two of four and one of eight MiB, of which never all at once; each run from zero."""
    kept = []

    def three() -> None:
        first = torch.zeros(1 << 20)
        second = first + 1
        del first
        both = torch.cat([second, second])
        del second, both

    def stays() -> None:
        kept.append(torch.ones(1 << 18))

    def frees() -> None:
        kept.clear()

    mib = 1 << 20
    found = peaks(torch.device("cpu"), [three, stays, three, frees])
    assert found == [12 * mib, mib, 12 * mib, 0]
    assert peaks(torch.device("cpu"), []) == []


def test_needs_are_measured_kept_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path))
    machine = open_machine("cpu")  # its kernels are proven elsewhere
    for impl in machine.registry.impls():
        machine.qualified[impl.id] = Qualification(impl.id, True, ())

    def measured(**options: Any) -> Any:
        return run(INTENT, CapacityOptions(**options), lambda text: None, machine)

    short = measured(seconds=1e-9, keep=False)
    assert not short["kept"] and 0 < short["reached"] < short["promised"]
    assert "bounded by a fit" in capacity_text(short)
    before = planned()
    found = measured()
    assert found["kept"] and found["reached"] == found["promised"] == 127
    steps = {(rows, context) for rows, context, _ in found["needs"]["peaks"]}
    assert {(48, 48), (48, 96), (30, 126), (1, 127)} <= steps
    assert any(rows == 3 for rows, _ in steps)  # all short answers at once
    assert all(size > 0 for *_, size in found["needs"]["peaks"])
    items = {row["item"]: row for row in found["items"]}
    for kind in ("weights", "kv"):
        assert items[kind]["difference"] == pytest.approx(0, abs=0.02)
    after = planned()
    rows = {row.kind: row for row in after.plan.ledger}
    assert rows["transient"].bytes == items["transient"]["measured_bytes"]
    assert rows["transient"].item.endswith("(measured)")
    assert after.plan.fingerprint == before.plan.fingerprint
    origins = [
        next(d.origin for d in each.plan.decisions if d.key == "transients")
        for each in (before, after)
    ]
    assert origins == [Origin.SEED, Origin.RECORD]
    text = capacity_text(found)
    assert "contexts up to 127 of 127" in text and "weights" in text and "in use" not in text
    told = {"used": 3 << 20, "planned": 2 << 20, "unexplained": 0.25}
    assert "in use              2.0 MiB      3.0 MiB  +25.0% of the card" in capacity_text(
        {**found, "device": told}
    )


def test_captured_steps_do_not_bound_chunks() -> None:
    """Recorded on an H200: replays take 512 bytes each, and a fit through them asked for 97 GB."""
    record = Path(__file__).parents[2] / "benchmarks/records/2026-11-30-h200-capacity-v4.json"
    payload = json.loads(record.read_text())["by_seeds"]["needs"]
    every = needs_from(payload)
    chunks = replace(every, peaks=tuple(p for p in every.peaks if p.bytes > 512))
    most = max(peak.bytes for peak in every.peaks)
    assert every.transient_bytes(4096, 131_071) > 90 * most
    assert most <= chunks.transient_bytes(4096, 131_071) < 1.01 * most


@pytest.mark.parametrize(
    ("phase", "runs", "expected"),
    [(Phase.DECODE, 8, True), (Phase.DECODE, 9, False), (Phase.CHUNK, 1, False)],
)
def test_a_step_in_a_bucket_is_the_graphs(phase: Phase, runs: int, expected: bool) -> None:
    ranks = (RankTokens(tuple(TokenRun(slot, 3, (5,)) for slot in range(runs))),)
    assert (
        _captured(Segment(phase, "single", ranks), [StepGraph(phase="decode", tokens=8, runs=8)])
        is expected
    )


def test_what_a_card_holds_beyond_the_ledger_is_a_share_of_it() -> None:
    """What is in use between steps is the allocator's, less weights and cache; what is left of a
    card counts as nothing's."""
    held = {"weights": 500, "kv": 200}
    memory = _DeviceMemory(allocated=760, reserved=900, outside=80, whole=2000)
    assert memory.beside(held) == 60 and _DeviceMemory().beside(held) is None
    resolved = planned()
    rows = (
        LedgerRow(item="w", kind="weights", bytes=930),
        LedgerRow(item="f", kind="free", bytes=9),
    )
    resolved = replace(resolved, plan=replace(resolved.plan, ledger=rows))
    told = {"bytes": 2000, "used": 980, "planned": 930, "unexplained": 0.025}
    assert _on_device(resolved, memory) == told
    assert _on_device(resolved, _DeviceMemory())["unexplained"] is None


def judge(found: Any, limit: Any) -> list[str]:
    """That of ``benchmarks/capacity.py``."""
    script = Path(__file__).parents[2] / "benchmarks" / "capacity.py"
    spec = importlib.util.spec_from_file_location("capacity_script", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    told: list[str] = module.judge(found, limit)
    return told


def item(name: str, planned: int, measured: int | None) -> dict[str, Any]:
    off = None if not measured else planned / measured - 1
    return {"item": name, "planned_bytes": planned, "measured_bytes": measured, "difference": off}


def test_the_ledger_is_judged_by_item_and_by_the_limit() -> None:
    good = {"limit": 100, "answered": 1, "refused": "102 tokens, the limit is 100"}
    unknown = {"unexplained": None}
    items = [item("weights", 102, 100), item("kv", 7, None), item("graphs", 50, 50)]
    right = {"items": items, "device": unknown}
    assert judge(right, good) == []
    items = [item("weights", 104, 100), item("kv", 90, 100), item("graphs", 50, 71)]
    off = {"items": items, "device": {"used": 1021, "planned": 1000, "unexplained": 0.021}}
    told = judge(off, good)
    assert [line.partition(":")[0] for line in told[:3]] == ["weights", "kv", "graphs"]
    assert told[3] == "1,021 B are in use, items explain 1,000"
    assert judge({**right, "device": {"unexplained": 0.02}}, good) == []
    assert len(judge(right, {**good, "answered": 0})) == 1
    assert len(judge(right, {**good, "refused": ""})) == 1
    assert len(judge(right, {**good, "refused": "too long"})) == 1
