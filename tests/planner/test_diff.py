"""``plan diff``: what two plans decide otherwise, and who says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metainfer.cli.examine import diff
from metainfer.core.errors import UsageError
from metainfer.core.intent import Intent
from metainfer.engine.elsewhere import describe
from metainfer.planner.diff import plan_diff
from metainfer.planner.opening import open_model
from metainfer.planner.report import plan_document

MODEL = open_model("random:tiny-qwen3")


def document(**wishes: Any) -> dict[str, Any]:
    intent = Intent(model="random:tiny-qwen3", kv_bytes=4 << 20, **wishes)
    found = plan_document(describe("cpu", intent).resolve(MODEL, intent))
    printed: dict[str, Any] = json.loads(json.dumps(found))
    return printed


def test_equal_plans_are_the_same() -> None:
    found = plan_diff(document(), document())
    assert found == {"same": True, "values": [], "ledger": [], "capacity": [], "layouts": []}


def test_a_changed_wish_shows_with_its_author_and_its_bytes() -> None:
    found = plan_diff(document(context=128), document(context=256))
    assert not found["same"]
    values = {row["key"]: row for row in found["values"]}
    assert "fingerprint" not in values
    limit = values["limits.max_context"]
    assert (limit["before"], limit["after"]) == (128, 256)
    assert limit["why"] == ["flag: asked for"] * 2
    ledger = {row["key"]: row for row in found["ledger"]}
    assert ledger["rotary tables"]["bytes"] == 128 * MODEL.arch.table_bytes(1)
    assert {row["key"] for row in found["capacity"]} >= {"max_context"}
    back = plan_diff(document(context=256), document(context=128))
    assert back["ledger"][0]["bytes"] == -found["ledger"][0]["bytes"]


def test_what_only_one_side_has() -> None:
    before, after = document(), document()
    after["ledger"].append({"item": "slabs", "bytes": 7})
    del after["layouts"][0]
    found = plan_diff(before, after)
    assert found["ledger"] == [{"key": "slabs", "before": None, "after": 7, "bytes": 7}]
    assert {row["after"] for row in found["layouts"]} == {None}
    assert "single.feasible" in {row["key"] for row in found["layouts"]}
    assert not found["values"]


def test_files(tmp_path: Path) -> None:
    one, two, bad = (tmp_path / name for name in ("one.json", "two.json", "bad.json"))
    one.write_text(json.dumps(document()))
    two.write_text(json.dumps(document(concurrency=3)))
    bad.write_text('{"error": {}}')
    assert diff(one, one).code == 0 and diff(one, one).text == "the same plan"
    found = diff(one, two)
    assert found.code == 1 and "limits.max_running: 32 -> 3" in found.text
    for wrong in (bad, tmp_path / "none.json"):
        with pytest.raises(UsageError, match=r"bad\.json|none\.json"):
            diff(one, wrong)
