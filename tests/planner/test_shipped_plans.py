"""DeepSeek-V4-Flash on every shipped machine: fast, by the schema, no byte unexplained."""

from __future__ import annotations

import copy
import importlib.util
import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from schema import faults

from metainfer.core.errors import RefusedError, UserError
from metainfer.core.intent import Intent
from metainfer.engine.elsewhere import describe
from metainfer.planner.opening import open_model
from metainfer.planner.report import plan_document
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
    assert chosen["feasible"] and chosen["built"] is alone
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
    assert keys["layouts"]["why"] == (
        "1 of 8 devices is used: layouts over several cards run only when asked for with --parallel"
    )
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


def test_serve_refuses_what_several_cards_would_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    from metainfer.engine import engine

    class Cards:
        def resolve(self, model: Any, intent: Intent) -> Any:
            return describe("8x-rtx-pro-6000d", intent).resolve(model, intent)

        def recall(self, dtype: str) -> None:
            raise AssertionError("a plan of several ranks went on")

    monkeypatch.setattr(engine, "open_machine", lambda platform: Cards())
    told = "layouts over several cards run only when asked for with --parallel"
    with pytest.raises(RefusedError, match=told) as caught:
        engine.Engine(Intent(model=FLASH)).start()
    assert caught.value.code == "not_built" and "8 devices" in caught.value.cause
    assert {reason.code for reason in caught.value.reasons} == {"memory", "not-built"}
    asked = caught.value.remedy.removeprefix("Ask for it: --parallel ").removesuffix(".")
    assert Cards().resolve(open_model(FLASH), Intent(model=FLASH, parallel=asked)).refusal() is None
