"""Dashboard and alert rules ask for what the metrics page has: names, labels and their values.

Prometheus itself over the same files: ``tests/conformance/heavy/prometheus.py``.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from metainfer.server.metrics_reference import families

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "docs" / "monitoring"
HEAVY = ROOT / "tests" / "conformance" / "heavy"
ADDED = {"instance", "job"}  # by Prometheus
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}


def known() -> dict[str, set[str]]:
    """Sample name -> its labels."""
    return {
        family.name + suffix: {*family._labelnames, *(["le"] if suffix == "_bucket" else [])}
        for family in families()
        for suffix in SUFFIXES[family.type]
    }


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    return found


def queries() -> list[str]:
    found = [rule["expr"] for rule in rules()]
    found += [t["expr"] for panel in panels() for t in panel.get("targets", ())]
    return found


def faults(expression: str) -> list[str]:
    """What of an expression the page does not have."""
    names = known()
    wrong = []
    used = re.findall(r"\b(metainfer_\w+)(?:\{([^}]*)\})?", expression)
    if not used:
        wrong.append("no metric")
    labels: set[str] = set()
    for name, selector in used:
        if name not in names:
            wrong.append(name)
            continue
        labels |= names[name] | ADDED
        wrong += [
            f"{name}{{{label}}}"
            for label in re.findall(r"(\w+)\s*[=!]", re.sub(r'"[^"]*"', "", selector))
            if label not in names[name] | ADDED
        ]
    for inside in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", expression):
        wrong += [f"by {label}" for label in inside.split(", ") if label not in labels]
    return wrong


@pytest.mark.parametrize("expression", queries())
def test_every_expression_asks_for_what_there_is(expression: str) -> None:
    assert not faults(expression)


@pytest.mark.parametrize(
    "expression",
    ["up == 0", "metainfer_no_such > 0", "metainfer_ops{phase='x'}", "metainfer_preemptions > 1",
     "sum by (pool) (metainfer_ops)", "metainfer_time_to_first_token_seconds > 1"],
)  # fmt: skip
def test_the_rule_sees_what_is_wrong(expression: str) -> None:
    assert faults(expression)


def test_labels_of_texts_exist() -> None:
    names = known()
    for rule in rules():
        labels = set.union(*(names[name] for name in re.findall(r"metainfer_\w+", rule["expr"])))
        text = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels | ADDED, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        for name in re.findall(r"metainfer_\w+", text):
            assert name in names or f"{name}_bucket" in names, name
    graphs = [(panel, t) for panel in panels() for t in panel.get("targets", ())]
    for panel, target in graphs:
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            used = re.findall(r"metainfer_\w+", target["expr"])
            assert all(label in names[name] | ADDED for name in used), panel["title"]


def test_every_flag_of_a_text_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "metainfer" / "cli").glob("*.py"))
    texts = [rule["annotations"]["description"] for rule in rules()]
    named = {flag for text in texts for flag in re.findall(r"--[a-z][a-z-]+", text)}
    assert len(named) > 4
    assert not [flag for flag in named if f'"{flag}"' not in sources]


def test_every_alert_has_its_two_cases() -> None:
    cases = runpy.run_path(str(HEAVY / "prometheus.py"))["CASES"]
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) and set(names) == set(cases)
    for fires, silent in cases.values():
        assert fires and silent and fires != silent


def test_the_last_run_of_prometheus_passed() -> None:
    result = json.loads((HEAVY.parent / "results" / "prometheus.json").read_text())
    assert len(result["checks"]) >= 9 and all(row["passed"] for row in result["checks"])


def test_the_last_run_of_the_browser_passed_and_is_of_this_page() -> None:
    result = json.loads((ROOT / "tests" / "browser" / "result.json").read_text())
    assert len(result["checks"]) >= 45 and all(row["passed"] for row in result["checks"])
    drive = runpy.run_path(str(ROOT / "tests" / "browser" / "drive.py"))
    assert result["page"] == drive["page_digest"](), "the page has changed: make browser"


def test_the_dashboard_is_current_and_sound() -> None:
    printed = subprocess.run(
        [sys.executable, str(MONITORING / "grafana.py")], capture_output=True, text=True, check=True
    ).stdout
    assert printed == (MONITORING / "grafana.json").read_text()
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    places = [panel["gridPos"] for panel in panels()]
    for index, a in enumerate(places):
        assert a["x"] + a["w"] <= 24
        for b in places[index + 1 :]:
            apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
    for panel in panels():
        assert panel["type"] == "row" or panel["targets"]
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}" and target["legendFormat"]


def test_the_dashboard_shows_what_matters() -> None:
    asked = set(re.findall(r"metainfer_(\w+)", " ".join(t for t in queries())))
    shown = {family.name.removeprefix("metainfer_") for family in families()} & {
        re.sub("_(total|bucket)$", "", name) for name in asked
    }
    assert shown >= {
        "requests_running", "requests_waiting", "generated_tokens", "prompt_tokens", "requests",
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_seconds",
        "kv_cache_usage_ratio", "preemptions", "prefix_cache_hit_tokens", "accepted_draft_tokens",
        "start_phase_seconds", "memory_held_bytes", "memory_planned_bytes", "ops", "link_lanes",
        "plan_verified", "engine_restarts", "admission_rejections", "trace_spans",
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_rules() -> None:
    command = ["promtool", "check", "rules", str(MONITORING / "alerts.yml")]
    subprocess.run(command, check=True)
