"""Machines that are not here: kernels, memory and findings from a file alone."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.step import Phase
from metainfer.doctor import elsewhere as doctor_elsewhere
from metainfer.doctor import report, text_report
from metainfer.engine import elsewhere, machine
from metainfer.kernels import evidence
from metainfer.kernels.conditions import shared_memory
from metainfer.kernels.impl import Context, Evidence, OpRequest
from metainfer.planner.layouts import NOT_BUILT
from metainfer.planner.opening import OpenedModel, open_model
from metainfer.planner.report import plan_document
from metainfer.platform.facts import Facts
from metainfer.platform.host_speed import HostSpeed
from metainfer.platform.machine_catalog import SHIPPED, find_machine
from metainfer.platform.origins import DERIVED

MODEL = "random:qwen3-8b"
UNSIZED = {"cpu"}  # memory unknown
UNKNOWN = str(Path(__file__).parent / "fixtures" / "unknown-card.toml")
"""Eight cards of which nothing is known."""
KNOWN_CARDS = [name for name in SHIPPED if name not in UNSIZED]


@pytest.fixture(scope="module")
def model() -> OpenedModel:
    return open_model(MODEL)


def plan(name: str, model: OpenedModel, **wishes: Any) -> dict[str, Any]:
    intent = Intent(model=MODEL, **wishes)
    return plan_document(elsewhere.describe(name, intent).resolve(model, intent))


def examine(name: str, **wishes: Any) -> dict[str, Any]:
    return report.doctor(Intent(model=MODEL, **wishes), name)


def ids(document: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in document["findings"]}


def reasons(document: dict[str, Any], op: str, impl: str) -> list[str]:
    """What stands against `impl` at `op` in some phase."""
    return [
        reason["message"]
        for row in document["ops"]
        if row["op"] == op
        for loser in row["rejected"]
        if loser["impl"] == impl
        for reason in loser["reasons"]
    ]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_machine_is_examined(name: str) -> None:
    document = examine(name, context=4096)
    assert {"machine", "software", "findings", "ops", "summary"} <= set(document)
    json.dumps(document)
    assert document["ops"] and document["machine"]["name"] == name
    assert report.exit_status(document) == int(name in UNSIZED)
    seen = {row["chosen"]["evidence"] for row in document["ops"]}
    assert Evidence.THIS_CARD.value not in seen and Evidence.NONE.value not in seen
    assert {row["chosen"]["quality"] for row in document["ops"]} <= {"native", "compatible"}
    assert {"machine.described", "machine.software", "machine.evidence"} <= ids(document)
    assert text_report.text(document)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_machine_is_planned_for(name: str, model: OpenedModel) -> None:
    wishes: dict[str, Any] = {"context": 4096}
    if name in UNSIZED:
        with pytest.raises(RefusedError) as caught:
            plan(name, model, **wishes)
        assert caught.value.code == "unknown_memory" and "--kv-memory" in caught.value.remedy
        wishes["kv_bytes"] = 4 << 30
    document = plan(name, model, **wishes)
    assert set(document) == {"plan", "ledger", "capacity", "layouts", "decisions"}
    json.dumps(document)
    assert document["capacity"]["max_context"] == 4096
    assert document["capacity"]["kv_tokens"] >= 4096
    decided = {row["key"]: row for row in document["decisions"]}
    assert decided["machine"]["value"] == name
    for key in ("machine", "device", "platform"):
        assert decided[key]["origin"] == Origin.FILE.value
    assert sum(decided["evidence"]["value"].values()) == len(document["plan"]["ops"])
    assert decided["threads"]["value"] == 1 and "unknown" in decided["threads"]["why"]
    assert decided["software"]["value"]["torch"] == "2.11"


@pytest.mark.parametrize("name", SHIPPED)
def test_other_devices_are_not_claimed_to_be_used(name: str, model: OpenedModel) -> None:
    document = plan(name, model, context=2048, kv_bytes=1 << 30)
    first, *others = document["layouts"]
    assert first["name"] == "single" and first["feasible"]
    count = len(find_machine(name).facts.devices)
    assert {f"tp{count}", f"{count}x"} <= {row["name"] for row in others} or count == 1
    assert first["built"] and not any(row["built"] for row in others)
    losers = next(row["losers"] for row in document["decisions"] if row["key"] == "layouts")
    for row, lost in zip(others, losers, strict=True):
        assert row["feasible"] is (not row["reasons"]) is (row["kv_tokens"] is not None)
        said = [reason["message"] for reason in lost["reasons"]]
        assert not row["feasible"] or NOT_BUILT in said
    why = next(row["why"] for row in document["decisions"] if row["key"] == "layouts")
    assert (f"1 of {count} devices" in why) == (count > 1)
    assert ("machine.devices" in ids(report.doctor(None, name))) == (count > 1)
    assert set(first) == set(others[0] if others else first)


def test_a_dense_model_on_8_0_takes_the_bf16_kernels() -> None:
    document = examine("8x-a800-pcie")
    chosen = {(row["op"], row["phase"]): row["chosen"] for row in document["ops"]}
    assert chosen["attn_paged", "decode"]["impl"] == "attn_paged/triton-split"
    assert chosen["linear.qkv", "chunk"] == {
        "impl": "linear/torch",
        "quality": "native",
        "evidence": Evidence.OTHER_CARD.value,
    }
    assert document["machine"]["devices"][0]["capability"] == [8, 0]


def test_b01_a_capability_that_is_too_low_or_unknown_is_the_reason(tmp_path: Path) -> None:
    text = (Path(str(_machines())) / "8x-a800-pcie.toml").read_text()
    path = tmp_path / "old.toml"
    path.write_text(text.replace("[8, 0]", "[7, 5]").replace('"8x-a800-pcie"', '"old"'))
    against = reasons(examine(str(path), context=4096), "attn_paged", "triton-split")
    assert "needs capability 8.0 or newer, this card has 7.5" in against
    against = reasons(examine(UNKNOWN), "attn_paged", "triton-split")
    assert "needs capability 8.0, this card's is unknown" in against


def _machines() -> object:
    from importlib import resources

    return resources.files("metainfer.platform") / "machines"


def test_b20_qwen3_8b_on_24_gb_fits_with_the_context_that_the_refusal_names(
    model: OpenedModel,
) -> None:
    with pytest.raises(RefusedError) as caught:
        plan("8x-4090", model, parallel="single")
    assert caught.value.code == "does_not_fit" and "40,960 tokens" in caught.value.cause
    advised = int(caught.value.remedy.split("--context to ")[1].rstrip(".").replace(",", ""))
    assert advised < 40_960
    with pytest.raises(RefusedError):  # what attention copies grows with it, and was tried, too
        plan("8x-4090", model, parallel="single", context=advised + 1)
    planned = elsewhere.describe("8x-4090").resolve(model, Intent(model=MODEL))
    assert planned.plan.layouts[0].ranks == 8  # over the cards it fits, and runs unasked
    assert planned.refusal() is None
    document = plan("8x-4090", model, context=advised)
    assert document["layouts"][0]["name"] == "single"
    assert document["capacity"]["max_context"] == advised
    assert sum(row["bytes"] for row in document["ledger"]) == 24e9


def test_b20_the_doctor_says_so_and_still_shows_the_kernels() -> None:
    document = examine("8x-4090", parallel="single")
    blockers = [f for f in document["findings"] if f["severity"] == "blocker"]
    assert [f["id"] for f in blockers] == ["ops.memory"]
    assert "B needed" in blockers[0]["what"]
    assert document["ops"] and report.exit_status(document) == 1
    assert report.exit_status(examine("8x-4090", context=28_672)) == 0
    assert report.exit_status(examine("8x-4090")) == 0  # over all of them


@pytest.mark.parametrize("name", ["2x-rtx-pro-6000", "8x-5090", "8x-rtx-pro-6000d"])
def test_b02_shared_memory_of_12_0_refuses_with_both_numbers(name: str) -> None:
    facts = find_machine(name).facts
    request = OpRequest("attn", "attn", Phase.DECODE, "bfloat16", {})
    verdict = shared_memory(131_072)(Context(request, facts))
    assert verdict.reasons[0].data == {"needed": 131_072, "limit": 101_376}
    against = reasons(examine(name, dtype="float32", context=2048), "attn_paged", "triton")
    wanted = "needs 163,840 B of shared memory per block, this card allows 101,376 B"
    assert against and wanted in against
    assert wanted not in reasons(examine(name, context=2048), "attn_paged", "triton")


def test_without_a_memory_rate_there_is_no_cost_and_the_order_is_the_declared(
    model: OpenedModel,
) -> None:
    document = plan(UNKNOWN, model, context=4096, kv_bytes=4 << 30)
    decided = {row["key"]: row for row in document["decisions"]}
    assert decided["bundle"]["origin"] == Origin.DEFAULT.value
    assert decided["bundle"]["why"].endswith("declared first: no cost is known")
    ops = [row for key, row in decided.items() if key.startswith("ops.")]
    assert {row["origin"] for row in ops} == {Origin.DEFAULT.value}
    assert all(row["slowdown"] is None for row in examine(UNKNOWN)["ops"])
    document = plan("cpu", model, context=4096, kv_bytes=4 << 30)
    whys = {row["why"] for row in document["decisions"] if row["key"].startswith("ops.")}
    assert "first in declared order: the memory rate is unknown, so no cost is" in whys


def test_a_rank_by_bytes_alone_says_so(model: OpenedModel) -> None:
    def why(name: str) -> str:
        rows = plan(name, model, context=4096)["decisions"]
        return next(str(row["why"]) for row in rows if row["key"] == "ops.attn_paged@decode")

    assert why("8x-l20") == "fastest by the cost model, by bytes alone: the matrix rate is unknown"
    assert why("1x-h200") == "fastest by the cost model"


def test_what_was_only_compiled_may_be_chosen_and_is_said(
    model: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {k: v for k, v in evidence.shipped().items() if k != "attn_paged/triton-split"}
    monkeypatch.setattr(evidence, "shipped", lambda: runs)
    document = examine("8x-4090", context=4096)
    rows = {(row["op"], row["phase"]): row for row in document["ops"]}
    assert rows["attn_paged", "decode"]["chosen"] == {
        "impl": "attn_paged/triton-split",
        "quality": "native",
        "evidence": Evidence.COMPILED.value,
    }
    (said,) = [f["what"] for f in document["findings"] if f["id"] == "machine.evidence"]
    compiled = [
        row for row in rows.values() if row["chosen"]["evidence"] == Evidence.COMPILED.value
    ]
    assert f"{len(compiled)} 'compiled only'" in said and "cases pass on the owner's card" in said
    decided = {row["key"]: row for row in plan("8x-4090", model, context=4096)["decisions"]}
    assert decided["evidence"]["value"][Evidence.COMPILED.value] == len(compiled)
    assert "owner's card" in decided["evidence"]["why"]

    monkeypatch.setattr(evidence, "compiled", dict)  # and without that, it may not
    document = examine("8x-4090", context=4096)
    against = reasons(document, "attn_paged", "triton-split")
    assert "evidence is 'none', auto needs 'compiled only'" in against


def test_evidence_of_another_capability_is_none_for_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evidence, "shipped", dict)
    monkeypatch.setattr(evidence, "compiled", lambda: {"op/k": frozenset({"sm_90"})})
    there, here = elsewhere.describe("8x-4090"), elsewhere.describe("1x-h200")
    intent = Intent(model=MODEL)
    assert "op/k" not in there.policy(intent).evidence
    assert here.policy(intent).evidence["op/k"] is Evidence.COMPILED


def test_records_of_this_computer_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from metainfer.core import records

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a record was read")

    monkeypatch.setattr(records.RecordStore, "get", never)
    assert examine("1x-h200")["ops"]


def test_software_that_the_file_states_is_taken_as_it_stands(tmp_path: Path) -> None:
    text = (Path(str(_machines())) / "1x-h200.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(
        text.replace('"1x-h200"', '"mine"')
        + '\n[software]\ntriton = { value = false, origin = "probed: metadata" }\n'
    )
    document = examine(str(path), context=4096)
    assert "triton is not installed" in reasons(document, "attn_paged", "triton-split")
    assert "software.triton" in ids(document) and document["software"]["torch"] == "2.11"
    assert document["machine"]["origins"]["software.torch"].startswith(f"{DERIVED}: ")


def test_the_required_software_is_what_the_package_requires() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    for name in ("torch", "triton"):
        (wanted,) = [line for line in listed if line.startswith(f"{name}>=")]
        assert wanted.partition(">=")[2].partition(",")[0] == elsewhere.REQUIRED[name]
    assert project["requires-python"] == f">={elsewhere.REQUIRED['python']}"
    assert "triton" not in elsewhere.missing_software(find_machine("cpu").facts)


def test_a_compiler_that_was_looked_for_and_not_found_is_not_assumed() -> None:
    facts = find_machine("cpu").facts
    assert elsewhere.COMPILER in elsewhere.missing_software(facts)
    looked = dataclasses.replace(facts, origins={"host.compiler": "probed: --version"})
    assert elsewhere.COMPILER not in elsewhere.missing_software(looked)


def test_a_platform_that_contradicts_the_machine() -> None:
    flag = {"platform": Origin.FLAG}
    with pytest.raises(UsageError, match="contradicts machine") as caught:
        elsewhere.describe("8x-4090", Intent(model=MODEL, platform="cpu", origins=flag))
    assert caught.value.code == "platform_of_machine"
    elsewhere.describe("8x-4090", Intent(model=MODEL, platform="cuda", origins=flag))
    env = {"platform": Origin.ENV}  # that word is about this computer
    elsewhere.describe("8x-4090", Intent(model=MODEL, platform="cpu", origins=env))


def test_findings_of_equal_devices_are_one_and_ask_the_owner() -> None:
    document = report.doctor(None, "8x-l40s")
    found = [f for f in document["findings"] if f["id"].endswith(".unknown")]  # type: ignore[attr-defined]
    assert [f["id"] for f in found if f["id"].startswith("gpu.")] == [
        "gpu.ecc.unknown",
        "gpu.power.unknown",
    ]
    assert all("--save-machine" in f["remedy"] for f in found)
    assert any("and 7 more like it" in f["where"] for f in found)
    assert not {"env.visible-devices", "disk.space", "host.cores"} & ids(document)  # type: ignore[arg-type]
    assert "device 0, 1, 2, 3, 4, 5, 6, 7  L40S" in text_report.text(document)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_described_machine_never_claims_to_have_been_measured(name: str) -> None:
    document = report.doctor(None, name)
    for finding in document["findings"]:  # type: ignore[attr-defined]
        assert "(probed" not in finding["evidence"], finding
        assert "(measured" not in finding["evidence"] or "h200" in name, finding
        assert finding["id"] not in ("link.peer-proven", "link.peer-data")
    described = [f for f in document["findings"] if f["id"] == "machine.described"]  # type: ignore[attr-defined]
    assert "not read off a machine" in described[0]["what"]


def test_this_machine_is_saved_and_reads_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    made = doctor_elsewhere.this_machine(path, "cpu")
    assert not any(said.startswith("seed") for said in made.facts.origins.values())
    doctor_elsewhere.save(None, str(path), "cpu")
    saved = find_machine(str(path))
    assert saved.name == "mine" and _steady(saved.facts) == _steady(made.facts)
    assert report.exit_status(report.doctor(Intent(model="random:tiny-llama"), str(path))) == 0
    doctor_elsewhere.save("8x-l20", str(path), None)  # a shipped one as a start
    assert find_machine(str(path)).facts == find_machine("8x-l20").facts


def test_a_guessed_speed_is_not_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    guess = HostSpeed(1e10, 1e11, "seed: the machine is busy")
    monkeypatch.setattr(machine, "host_speed", lambda facts, store: guess)
    path = tmp_path / "mine.toml"
    doctor_elsewhere.save(None, str(path), "cpu")
    facts = find_machine(str(path)).facts
    assert facts.host.read_bytes_s is None and facts.device.dot_flops == {}
    assert not any(said.startswith("seed") for said in facts.origins.values())


def _steady(facts: Facts) -> object:
    """All but the speed, which may be measured between two calls."""
    origins = {k: v for k, v in facts.origins.items() if "bytes_s" not in k and "flops" not in k}
    device = dataclasses.replace(facts.device, read_bytes_s=None, dot_flops={})
    host = dataclasses.replace(facts.host, read_bytes_s=None)
    return dataclasses.replace(facts, devices=(device,), host=host, origins=origins)


def test_no_torch_no_device_and_quick() -> None:
    code = """
import json, resource, sys
from metainfer.cli import main
codes = [main.run([verb, "--machine", "8x-a800-pcie", "--model", "random:qwen3-8b", "--json"])
         for verb in ("doctor", "plan")]
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([codes, "torch" in sys.modules, used.ru_utime + used.ru_stime]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second, last = done.stdout.splitlines()
    assert "ops" in json.loads(first) and "layouts" in json.loads(second)
    codes, torch_loaded, seconds = json.loads(last)
    assert codes == [0, 0] and torch_loaded is False
    assert seconds < 4.0  # two verbs, two seconds each


@pytest.mark.parametrize("name", KNOWN_CARDS)
def test_a_context_that_cannot_be_is_refused_as_here(name: str, model: OpenedModel) -> None:
    with pytest.raises(RefusedError, match="exceeds the model's"):
        plan(name, model, context=1 << 20)
    assert report.exit_status(examine(name, context=1 << 20)) == 1


def test_the_command_line_says_where_it_saved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from metainfer.cli import main

    path = str(tmp_path / "m.toml")
    assert main.run(["doctor", "--machine", "8x-l20", "--save-machine", path]) == 0
    assert f"machine file: {path}" in capsys.readouterr().out
    assert main.run(["doctor", "--machine", path]) == 0


def test_exit_codes_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from metainfer.cli import main

    base = ["--model", MODEL, "--context", "4096"]
    for words, code in (
        (["plan", "--machine", "8x-4090", *base], 0),
        (["plan", "--machine", UNKNOWN, *base], 1),
        (["plan", "--machine", UNKNOWN, *base, "--kv-memory", "4GiB"], 0),
        (["doctor", "--machine", UNKNOWN, *base], 1),
        (["doctor", "--machine", UNKNOWN], 0),
        (["plan", "--machine", "8x-4091", *base], 2),
        (["doctor", "--machine", "nowhere.toml"], 2),
        (["doctor", "--save-machine", "mine.json"], 2),
    ):
        assert main.run(words) == code, words
        shown = capsys.readouterr()
        assert (code < 2) or (len(shown.err.splitlines()) == 1 and shown.err.startswith("error: "))
