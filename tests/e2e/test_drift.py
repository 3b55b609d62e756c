"""A machine that changed since the last start is told of, with what changed."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from metainfer.cli.start_screen import summary
from metainfer.core.intent import Intent
from metainfer.engine import engine
from metainfer.engine.drift import drift
from metainfer.engine.engine import Engine
from metainfer.engine.machine import Machine, open_machine
from metainfer.kernels.evidence import Qualification
from metainfer.platform.fingerprint import fingerprint

INTENT = Intent(model="random:tiny-llama?layers=1", platform="cpu", context=64, concurrency=2)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This processor, whose kernels are proven elsewhere."""
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path))
    found = open_machine("cpu")
    for impl in found.registry.impls():
        found.qualified[impl.id] = Qualification(impl.id, True, ())
    return found


def test_every_fact_that_changed_is_named_once(
    machine: Machine, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    facts = machine.facts
    assert drift(fingerprint(facts)) == []
    assert drift(fingerprint(facts)) == [] and not caplog.records
    host = replace(facts.host, usable_cores=1_000)
    changed = replace(facts, host=host, software={**facts.software, "torch": "9.9"})
    with caplog.at_level(logging.WARNING):
        lines = drift(fingerprint(changed))
    assert [line.partition(":")[0] for line in lines] == ["software.torch", "usable_cores"]
    assert lines[0].endswith("-> '9.9'") and lines[1].endswith("-> 1000")
    assert "Records of the former one do not apply" in caplog.text
    assert drift(fingerprint(changed)) == []  # told once
    other = replace(changed, platform="another")
    assert drift(fingerprint(other)) == []  # asking for another platform is no change
    (tmp_path / "last-machine-cpu.json").write_text("{")
    assert drift(fingerprint(facts)) == []  # nothing is known of before


def test_a_start_tells_whoever_started_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(found: Machine) -> list[str]:
        monkeypatch.setattr(engine, "open_machine", lambda platform: found)
        started = Engine(INTENT)
        info = started.start()
        started.close()
        told = [line for line in summary(info, "http://x", ("m",)) if "changed since" in line]
        assert info.plan["drift"] == [line.partition("here: ")[2] for line in told]
        return told

    assert start(machine) == []
    newer = {**machine.facts.software, "torch": "9.9"}
    machine.facts = replace(machine.facts, software=newer)
    (told,) = start(machine)
    assert "software.torch" in told and "'9.9'" in told
