"""A card that nobody has seen: what passes is unlocked; what dies is a row and not the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "platform"))
from packages import FAKE, install

from metainfer.core.intent import Intent
from metainfer.engine.machine import _source_digest, open_machine
from metainfer.engine.proving import NOT_BEGUN, Tried
from metainfer.kernels.evidence import evidence_for
from metainfer.kernels.impl import Evidence
from metainfer.verifier.bringup import bring_up
from metainfer.workers.process import Child, spawn_python

HERE = Path(__file__).parent


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The vendor's package in this process and its children, with records of their own."""
    site = install(FAKE, tmp_path / "site")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{HERE}")
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path / "cache"))
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "acme_platform":
            del sys.modules[name]


def add_kernels(site: Path, *names: str) -> None:
    """The vendor's one kernel under several names."""
    file = site / "acme_platform" / "impls.py"
    file.write_text(
        file.read_text()
        + "\nimport dataclasses\n"
        + f"IMPLS = tuple(dataclasses.replace(IMPLS[0], name=n) for n in {names!r})\n"
    )


def test_what_passes_is_unlocked_and_the_report_names_no_user(acme: Path, tmp_path: Path) -> None:
    machine = open_machine("acme")
    assert evidence_for(machine.facts, ids=["rmsnorm/acme"]) == {}
    target = tmp_path / "out" / "report.json"
    document = bring_up(
        Intent(model="", platform="acme"), target, lambda text: None, time_limit_s=120.0
    )
    assert document["unlocked"] == ["rmsnorm/acme"] and not document["failed"]
    assert json.loads(target.read_text()) == json.loads(json.dumps(document))
    assert "unlocked: rmsnorm/acme" in target.with_suffix(".txt").read_text()
    rows = {row["impl"]: row for row in document["kernels"]}
    assert rows["rmsnorm/acme"]["outcome"] == "passed"
    assert rows["linear/torch"]["outcome"] == "refused"
    assert any("this device is fake" in why for why in rows["linear/torch"]["reasons"])
    text = target.read_text()
    assert str(Path.home()) + "/" not in text and os.uname().nodename not in text
    assert document["card"]["name"] == "Acme One" and "uuid" not in document["card"]

    again = open_machine("acme")
    again.recall(document["dtype"])
    found = evidence_for(again.facts, tuple(again.qualified.values()))
    assert found["rmsnorm/acme"] is Evidence.THIS_CARD
    known = bring_up(
        Intent(model="", platform="acme"), target, lambda text: None, time_limit_s=120.0
    )
    assert {row["impl"]: row["outcome"] for row in known["kernels"]}["rmsnorm/acme"] == "known"


def test_a_crash_and_a_hang_are_rows_and_stay_locked(acme: Path, tmp_path: Path) -> None:
    add_kernels(acme, *(f"kernel-{letter}" for letter in "abcde"))
    said: list[str] = []
    document = bring_up(
        Intent(model="", platform="acme"), tmp_path / "r.json", said.append,
        time_limit_s=3.0, child="dying_child",
    )  # fmt: skip
    rows = {row["impl"]: row for row in document["kernels"]}
    found = {key: rows[f"rmsnorm/kernel-{key}"]["outcome"] for key in "abcde"}
    assert found == {"a": "passed", "b": "crashed", "c": "hung", "d": "failed", "e": "passed"}
    assert "SIGSEGV" in rows["rmsnorm/kernel-b"]["reasons"][0]
    assert rows["rmsnorm/kernel-c"]["reasons"] == ["no answer within 3 s"]
    assert rows["rmsnorm/kernel-d"]["reasons"] == ["case one: ~/kernel.so is missing"]
    assert document["failed"] == ["rmsnorm/kernel-b", "rmsnorm/kernel-c", "rmsnorm/kernel-d"]
    assert any("crashed" in line for line in said)
    machine = open_machine("acme")
    machine.recall(document["dtype"])
    locked = {key for key, found in machine.qualified.items() if not found.passed}
    assert {"rmsnorm/kernel-b", "rmsnorm/kernel-c"} <= locked


def test_several_children_try_kernels_and_no_outcome_is_lost(
    acme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that crashes and the one that hangs cost themselves alone, in any lane; no two lanes
    compute with the same core."""
    threads = list[int]()

    def spawned(*wanted: Any, environ: Mapping[str, str], **more: Any) -> Child:
        threads.append(int(environ["OMP_NUM_THREADS"]))
        return spawn_python(*wanted, environ=environ, **more)

    monkeypatch.setattr("metainfer.engine.proving.spawn_python", spawned)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(14)))
    add_kernels(acme, *(f"kernel-{letter}" for letter in "abcde"))
    machine = open_machine("acme")
    impls = [impl for impl in machine.registry.impls() if "/kernel-" in impl.id]
    found = machine.prove_apart(
        impls, "float32", lanes=3, time_limit_s=3.0, child="dying_child"
    )  # fmt: skip
    outcomes = {tried.impl[-1]: tried.outcome for tried in found}
    assert outcomes == {"a": "passed", "b": "crashed", "c": "hung", "d": "failed", "e": "passed"}
    assert threads[:4] == [4] * 4  # side by side: a child for each, and one behind the crash
    assert set(threads[4:]) == {14}  # what did not pass, once more alone
    again = open_machine("acme")
    again.recall("float32")
    passed = {key[-1]: kept.passed for key, kept in again.qualified.items() if "/kernel-" in key}
    assert passed == {key: outcome == "passed" for key, outcome in outcomes.items()}


def test_a_first_start_shares_kernels_out_over_the_cores(acme: Path) -> None:
    machine = open_machine("acme")
    host = replace(machine.facts.host, usable_cores=16)
    many, few = replace(machine.facts, host=host), open_machine("cpu").facts
    assert [replace(machine, facts=many)._lanes(n) for n in (1, 3, 40)] == [1, 3, 16]
    assert replace(machine, facts=few)._lanes(40) == 1  # a host's kernels use all cores themselves


def test_what_fails_beside_others_is_tried_alone(
    acme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowded card refuses memory; a child that never began says nothing and is no record."""
    add_kernels(acme, *(f"kernel-{letter}" for letter in "abc"))
    turns: list[tuple[list[str], int]] = []

    def crowded(ids: Sequence[str], *, lanes: int = 1, **more: object) -> Iterator[Tried]:
        turns.append(([key[-1] for key in ids], lanes))
        for key in ids:
            if key.endswith("c"):
                yield Tried(key, "crashed", (NOT_BEGUN,))
            else:
                passed = lanes == 1 or key.endswith("a")
                yield Tried(key, "passed" if passed else "failed", () if passed else ("memory",))

    monkeypatch.setattr("metainfer.engine.machine.try_apart", crowded)
    machine = open_machine("acme")
    impls = [impl for impl in machine.registry.impls() if "/kernel-" in impl.id]
    found = {
        tried.impl[-1]: tried.outcome for tried in machine.prove_apart(impls, "float32", lanes=3)
    }
    assert turns == [(["a", "b", "c"], 3), (["b", "c"], 1)]
    assert found == {"a": "passed", "b": "passed", "c": "crashed"}
    assert not machine.qualified["rmsnorm/kernel-c"].passed  # not chosen by this start
    again = open_machine("acme")
    again.recall("float32")
    assert {key[-1] for key in again.qualified if "/kernel-" in key} == {"a", "b"}


def test_kernel_code_that_ops_share_is_part_of_what_was_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a change of it would leave its callers proven."""
    whole = _source_digest.__wrapped__("metainfer.ops.linear")
    monkeypatch.setattr("metainfer.engine.machine.OPS", "elsewhere")
    assert _source_digest.__wrapped__("metainfer.ops.linear") != whole
