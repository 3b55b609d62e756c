"""DeepSeek-V4-Flash on every shipped machine: fast, by the schema, no byte unexplained."""

from __future__ import annotations

import copy
import importlib.util
import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from schema import faults

from metainfer.core.errors import RefusedError, UserError
from metainfer.core.intent import Intent
from metainfer.engine.elsewhere import describe
from metainfer.kernels.choice import Policy
from metainfer.kernels.impl import Evidence
from metainfer.ops.catalog import builtin_registry
from metainfer.planner.candidate import Candidate
from metainfer.planner.layouts import NOT_BUILT, enumerate_layouts, runs
from metainfer.planner.opening import open_model
from metainfer.planner.report import plan_document
from metainfer.planner.resolve import resolve
from metainfer.planner.search import unbuilt
from metainfer.platform.machine_catalog import SHIPPED, find_machine

FLASH, QWEN = "random:deepseek-v4-flash", "random:qwen3-8b"
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "plan.schema.json").read_text())
SECONDS = 4.0


@cache
def document(model: str, machine: str, **wishes: Any) -> dict[str, Any]:
    """What ``plan --json`` prints."""
    intent = Intent(model=model, **wishes)
    try:
        return plan_document(describe(machine, intent).resolve(open_model(model), intent))
    except UserError as error:
        return error.to_json()


def check(found: dict[str, Any]) -> None:
    found = json.loads(json.dumps(found))
    assert faults(found, SCHEMA, SCHEMA) == []
    if importlib.util.find_spec("jsonschema") is not None:
        from jsonschema import Draft202012Validator

        Draft202012Validator(SCHEMA).validate(found)


@pytest.mark.parametrize("machine", SHIPPED)
def test_flash_on_every_shipped_machine(machine: str) -> None:
    open_model("random:tiny-llama"), describe("cpu")  # imports are the start's, not the plan's
    begin = time.process_time()
    found = document(FLASH, machine)
    assert time.process_time() - begin < SECONDS
    check(found)
    devices = len(find_machine(machine).facts.devices)
    if "error" in found:
        assert found["error"]["code"] in ("does_not_fit", "unknown_memory")
        if found["error"]["code"] == "does_not_fit" and devices > 1:
            refused = {reason["data"]["layout"] for reason in found["reasons"]}
            assert {"single", f"tp{devices}", f"ep{devices}"} <= refused  # all in one pass
        return
    capacity, ledger = found["capacity"], found["ledger"]
    held = [row["bytes"] for row in ledger if row["memory"] == "device"]
    assert sum(held) == capacity["device_bytes"] and capacity["unexplained_bytes"] == 0
    assert all(row["bytes"] >= 0 for row in ledger)
    chosen, *others = found["layouts"]
    alone = machine == "8x-b300"  # one of its cards holds the model
    assert chosen["feasible"] and chosen["built"]
    assert not any(row["built"] and row["feasible"] for row in others)
    assert chosen["ranks"] == (1 if alone else devices)
    rows = [row["bytes"] for row in ledger if row["kind"] == "kv"]
    assert chosen["kv_bytes"] == sum(rows)
    assert all(row["feasible"] or row["reasons"] for row in others)
    last = chosen["pairs"][-1]
    assert last["context"] == chosen["max_context"] and last["concurrency"] >= chosen["data"]


def test_which_machines_hold_it() -> None:
    """Weights of 156 GB: more than one H200, less than two cards of 96 GB; sixteen bits do not."""
    assert document(FLASH, "1x-h200")["error"]["code"] == "does_not_fit"
    assert document(FLASH, "2x-rtx-pro-6000")["layouts"][0]["feasible"]
    assert document(FLASH, "8x-rtx-pro-6000d")["layouts"][0]["feasible"]


def test_a_model_for_one_card_is_served_by_one() -> None:
    found = document(QWEN, "8x-rtx-pro-6000d")
    check(found)
    chosen = found["layouts"][0]
    assert (chosen["name"], chosen["built"]) == ("single", True)
    assert [row["name"] for row in found["layouts"][1:] if row["feasible"]]
    keys = {row["key"]: row for row in found["decisions"]}
    assert keys["layouts"]["why"] == f"1 of 8 devices is used: {NOT_BUILT}"
    assert keys["goal_layout"]["value"] != "single" and keys["goal_layout"]["losers"]


@pytest.mark.parametrize("name", ["kv_bytes", "reasons", "prediction"])
def test_the_schema_misses_what_is_gone(name: str) -> None:
    found = document(QWEN, "2x-rtx-pro-6000")
    broken = copy.deepcopy(found)
    del broken["layouts"][1][name]
    assert faults(broken, SCHEMA, SCHEMA)
    broken = copy.deepcopy(found)
    broken["layouts"][0]["speed"] = 1
    assert faults(broken, SCHEMA, SCHEMA)
    broken = copy.deepcopy(found)
    broken["ledger"][0]["kind"] = "rest"
    assert faults(broken, SCHEMA, SCHEMA)


def test_serve_takes_several_cards_where_no_single_one_holds_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody has to ask for what is the only way; why is on the record."""
    from metainfer.engine import engine

    class WentOn(Exception):
        pass

    class Cards:
        def resolve(self, model: Any, intent: Intent) -> Any:
            return describe("8x-rtx-pro-6000d", intent).resolve(model, intent)

        def recall(self, dtype: str) -> None:
            raise WentOn

    monkeypatch.setattr(engine, "open_machine", lambda platform: Cards())
    with pytest.raises(WentOn):
        engine.Engine(Intent(model=FLASH)).start()
    keys = {row["key"]: row for row in document(FLASH, "8x-rtx-pro-6000d")["decisions"]}
    assert keys["layouts"]["value"] == keys["goal_layout"]["value"] != "single"
    assert keys["layouts"]["why"].endswith("; no single card holds the model with these limits")
    assert keys["collectives"]["value"] == "auto"


def test_over_devices_of_another_kind_it_is_refused() -> None:
    layout = next(each for each in enumerate_layouts(8, 256) if each.name == "tp8")
    (reason,) = runs(layout, "npu", asked=True).reasons
    one = Candidate(layout=enumerate_layouts(1, 0)[0], error=RefusedError("too large", ""))
    refusal = unbuilt(layout, (one, Candidate(layout=layout, planned_only=(reason,))))
    assert refusal is not None and refusal.code == "not_built"
    assert "on CUDA cards and on a host, not on npu" in refusal.cause
    assert runs(layout, "cuda", asked=True).accepted


def test_several_devices_of_another_kind_are_planned_and_say_why_they_do_not_run() -> None:
    model, facts = open_model(QWEN), find_machine("8x-4090").facts
    devices = tuple(replace(each, kind="npu") for each in facts.devices)
    policy = Policy(min_evidence=Evidence.NONE, allow_fallback=frozenset({"all"}))
    found = resolve(
        Intent(model=QWEN), model.facts, replace(facts, devices=devices), builtin_registry(), policy
    )
    (told,) = (each for each in found.plan.decisions if each.key == "layouts")
    refusal = found.refusal()
    assert found.plan.layouts[0].ranks == 8 and refusal is not None
    for words in (told.why, refusal.cause):
        assert "run on CUDA cards and on a host, not on npu" in words
