"""`tune kernels`: pruned, verified, timed in turns, kept by class of card; B-07's nearest entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from metainfer.bench.kernels import KernelOptions, Tried, run
from metainfer.core.errors import UsageError, UserError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.records import Record, RecordStore
from metainfer.core.step import Phase
from metainfer.engine.machine import Machine, open_machine
from metainfer.kernels import tuning
from metainfer.kernels.audit import target_facts
from metainfer.kernels.explain import rows
from metainfer.kernels.impl import Context, Impl, OpRequest, Setting
from metainfer.kernels.table import OpTable
from metainfer.kernels.tuning import Entry, Tunings, card_class, fitting
from metainfer.ops.catalog import builtin_registry
from metainfer.ops.linear.impls_triton import IMPLS as FP8
from metainfer.planner.opening import open_model

MODEL = "random:tiny-llama"
NORM = next(impl for impl in builtin_registry().impls() if impl.id == "rmsnorm/c")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path))
    opened = open_machine("cpu")
    host = replace(opened.facts.host, usable_cores=4)
    opened.facts = replace(opened.facts, host=host)
    return opened


def timer(fastest: int) -> Callable[[Any, Tried], Callable[[], float]]:
    """Two threads differ from all others by as much as is asked; no clock is read."""

    def make(call: Any, tried: Tried) -> Callable[[], float]:
        call()
        seconds = 1e-6 if tried.setting.values["threads"] == fastest else 3e-6
        return lambda: seconds

    return make


OPTIONS = KernelOptions(rounds=3, ops=("rmsnorm",))
INTENT = Intent(model=MODEL, platform="cpu", concurrency=4, threads=2)


def plan_of(machine: Machine, **intent: Any) -> Any:
    return machine.resolve(open_model(MODEL), replace(INTENT, **intent))


def test_what_is_kept_is_what_the_next_plan_launches(machine: Machine) -> None:
    before = plan_of(machine).plan
    document: Any = run(INTENT, OPTIONS, lambda text: None, machine, timer(2))
    assert document["tuned"] and not document["skipped"]
    for row in document["tuned"]:
        assert [c["setting"]["threads"] for c in row["candidates"]] == [0, 1, 2]
        assert row["kept"] == [{"impl": "rmsnorm/c", "setting": {"threads": 2}, "seconds": 1e-6}]
    resolved = plan_of(machine)
    op = resolved.plan.ops["rmsnorm@decode"]
    assert (dict(op.setting), op.tuned) == ({"threads": 2}, "measured here")
    assert resolved.plan.fingerprint != before.fingerprint
    (found,) = [d for d in resolved.plan.decisions if d.key == "ops.rmsnorm@decode"]
    assert found.origin is Origin.RECORD
    table = OpTable(resolved.selection)
    assert table.phase(Phase.DECODE).rmsnorm.keywords == {"threads": 2}  # type: ignore[attr-defined]
    x, weight = torch.randn(3, 64), torch.ones(64)
    assert table.phase(Phase.DECODE).rmsnorm(x, weight, 1e-6).shape == (3, 64)


def test_a_tie_leaves_a_kernel_as_it_is(machine: Machine) -> None:
    document: Any = run(INTENT, OPTIONS, lambda text: None, machine, timer(-1))
    assert {k["setting"]["threads"] for row in document["tuned"] for k in row["kept"]} == {0}


def test_an_op_that_the_plan_lacks_is_told_with_those_that_it_has(machine: Machine) -> None:
    with pytest.raises(UsageError, match=r"no op 'nope'\..* It has: .*rmsnorm"):
        run(INTENT, replace(OPTIONS, ops=("rmsnorm", "nope")), lambda text: None, machine, timer(2))


def test_nothing_is_kept_on_a_dry_run(machine: Machine) -> None:
    run(INTENT, replace(OPTIONS, keep=False), lambda text: None, machine, timer(2))
    assert plan_of(machine).plan.ops["rmsnorm@decode"].tuned == ""


def test_wrong_candidates_are_never_timed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 4: one setting computes something else; it is refused with its case, others go on."""
    from metainfer.ops.norm import cpu_c

    sound = cpu_c.rmsnorm

    def faulty(x: Any, weight: Any, eps: float, *, threads: int = 0) -> Any:
        return sound(x, weight, eps, threads=threads) * (1.01 if threads == 2 else 1)

    monkeypatch.setattr(cpu_c, "rmsnorm", faulty)
    document: Any = run(INTENT, OPTIONS, lambda text: None, machine, timer(2))
    for row in document["tuned"]:
        wrong = next(c for c in row["candidates"] if c["setting"]["threads"] == 2)
        assert "median" not in wrong and wrong["reasons"]
        assert row["kept"][0]["setting"] == {"threads": 0}


def test_b02_what_does_not_fit_is_refused_before_it_is_compiled() -> None:
    settings = [Setting({"n": n}, 1000 * n) for n in (1, 200, 50)]
    kept, refused = fitting(settings, 101_376)
    assert [s.values["n"] for s in kept] == [1, 50]
    assert [r.data for r in refused] == [{"needed": 200_000, "limit": 101_376}]
    assert fitting(settings, None) == (settings, [])


@pytest.mark.parametrize("impl", FP8, ids=lambda impl: impl.name)
@pytest.mark.parametrize(("target", "limit"), [("sm_120", 101_376), ("sm_90", 232_448)])
def test_fp8_tiles_have_candidates_on_either_kind_of_card(
    impl: Impl, target: str, limit: int
) -> None:
    facts = target_facts(target, {"triton": "3.7.1"})
    for count, name in ((1, "stream_tile"), (4096, "chunk_tile")):
        shape = {"rows": count, "n": 4096, "k": 1024}
        request = OpRequest("linear", "linear.qkv", Phase.CHUNK, "bfloat16", shape)
        assert impl.settings is not None
        settings = impl.settings(Context(request, facts))
        kept, _ = fitting(settings, limit)
        assert kept[0] == settings[0] and len(kept) > 4  # the card's own tile, and others
        assert all(set(setting.values) == {name} for setting in settings)


def entry(
    rows: int, threads: int, *, phase: str = "decode", source: str = "s", **card: Any
) -> Entry:
    return Entry(
        impl="rmsnorm/c", dtype="float32", phase=phase, shape={"rows": rows, "d": 4096},
        values={"threads": threads}, seconds=1e-6, source=source, card=card,
    )  # fmt: skip


def asked(rows: int, d: int = 4096, phase: Phase = Phase.DECODE) -> OpRequest:
    return OpRequest("rmsnorm", "rmsnorm", phase, "float32", {"rows": rows, "d": d})


@pytest.mark.parametrize("d", [4096, 5120, 6144, 7168])
def test_b07_hit_borrowed_or_default(d: int) -> None:
    tunings = Tunings([entry(1, 1), entry(64, 4)], [], {"rmsnorm/c": "s"})
    found = tunings.find(NORM, asked(64, d), 8)
    assert found is not None and dict(found.values) == {"threads": 4}
    if d == 4096:
        assert (found.seconds, found.text) == (1e-6, "measured here")
    else:
        assert found.seconds is None and found.text == "borrowed from decode at d=4096 rows=64"
    nearer = tunings.find(NORM, asked(2, d), 8)
    assert nearer is not None and dict(nearer.values) == {"threads": 1}
    assert Tunings([], [], {}).find(NORM, asked(1), 8) is None
    stale = Tunings([entry(1, 1, source="old")], [], {"rmsnorm/c": "s"})
    assert stale.find(NORM, asked(1), 8) is None


def test_a_record_that_is_none_is_named_with_its_file(tmp_path: Path) -> None:
    own = card_class(target_facts("sm_120", {}))
    store = RecordStore(tmp_path, own)
    store.put(Record(tuning.KIND, "k", {"impl": "rmsnorm/c"}, {}))
    with pytest.raises(UserError, match="missing 6 required") as caught:
        tuning.read(store, own, {})
    assert str(store.path(tuning.KIND)) in caught.value.cause
    assert "Delete it" in caught.value.remedy


def test_b07_another_phase_is_borrowed_after_the_same_one() -> None:
    same, other = entry(512, 2, phase="chunk"), entry(64, 4, phase="decode")
    tunings = Tunings([same, other], [], {"rmsnorm/c": "s"})
    found = tunings.find(NORM, asked(64, phase=Phase.CHUNK), 8)
    assert found is not None and dict(found.values) == {"threads": 2}
    mixed = tunings.find(NORM, asked(64, phase=Phase.MIXED), 8)
    assert mixed is not None and mixed.seconds is None and dict(mixed.values) == {"threads": 4}


def test_b07_a_class_is_no_product_name() -> None:
    """Four names of one chip share entries; a smaller chip borrows, another capability does not."""
    facts = target_facts("sm_120", {})
    names = ("RTX PRO 6000 Workstation", "RTX PRO 6000 Max-Q", "RTX PRO 6000 Server", "6000D")
    made = {
        card_class(replace(facts, devices=(replace(facts.device, name=name, uuid=name),))).id
        for name in names
    }
    assert len(made) == 1
    assert card_class(target_facts("sm_89", {})).id not in made


def test_b07_the_nearest_class_is_borrowed_and_said(machine: Machine, tmp_path: Path) -> None:
    own = card_class(machine.facts)
    own = replace(own, facts={**own.facts, "units": 5})
    source = {"rmsnorm/c": "s"}
    store = RecordStore(tmp_path / "elsewhere", own)
    for units, threads in ((2, 1), (64, 4)):
        other = store.of(replace(own, facts={**own.facts, "units": units}))
        other.put(tuning.record(entry(1, threads), {}))
    foreign = store.of(replace(own, facts={**own.facts, "capability": "another"}))
    foreign.put(tuning.record(entry(1, 8), {}))
    found = tuning.read(store, own, source).find(NORM, asked(1), 5)
    assert found is not None and dict(found.values) == {"threads": 1} and found.seconds is None
    assert "on 2 units with" in found.text
    assert tuning.read(foreign, own, source).find(NORM, asked(1), 3) is not None


def test_b07_plan_and_doctor_say_what_is_borrowed(machine: Machine) -> None:
    run(INTENT, OPTIONS, lambda text: None, machine, timer(2))
    borrowed = plan_of(machine, concurrency=3)
    op = borrowed.plan.ops["rmsnorm@decode"]
    assert op.tuned.startswith("borrowed from decode at ") and dict(op.setting) == {"threads": 2}
    row = next(
        r for r in rows(borrowed.selection) if (r["op"], r["phase"]) == ("rmsnorm", "decode")
    )
    assert row["chosen"]["tuned"] == op.tuned  # type: ignore[index]
