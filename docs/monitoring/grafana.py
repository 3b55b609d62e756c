"""Prints the dashboard; its output is `grafana.json` beside it.

A panel is a title, a unit and its curves (expression, legend); variables like `$model` are filled
in by Grafana. The names are held to the code by ``tests/server/test_monitoring.py``.
"""

from __future__ import annotations

import json
from typing import Any

WIDTH, HEIGHT = 8, 7
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
MODEL = 'model_name=~"$model", instance=~"$instance"'

Curves = list[tuple[str, str]]


def total(name: str, by: str = "") -> str:
    """Rate of a counter, over all instances."""
    return f"sum by ({by}) (rate(metainfer_{name}[$__rate_interval]))".replace(" by ()", "")


def share(part: str, whole: str) -> str:
    return f"{total(part)} / {total(whole)}"


def quantiles(name: str) -> Curves:
    """Median, 95th and 99th percentile of a histogram of seconds."""
    return [
        (
            f"histogram_quantile({q}, sum by (le) "
            f"(rate(metainfer_{name}_bucket[$__rate_interval])))",
            f"p{100 * q:g}",
        )
        for q in (0.5, 0.95, 0.99)
    ]


ROWS: list[tuple[str, list[tuple[str, str, Curves]]]] = [
    (
        "Load",
        [
            ("Ready", "short", [("metainfer_ready", "{{instance}}")]),
            (
                "Sequences",
                "short",
                [
                    ("sum(metainfer_requests_running)", "running"),
                    ("sum(metainfer_requests_waiting)", "waiting"),
                ],
            ),
            (
                "Tokens per second",
                "short",
                [
                    (total("generated_tokens_total"), "written"),
                    (total("prompt_tokens_total"), "read"),
                    (total("prefix_cache_hit_tokens_total"), "from the cache"),
                ],
            ),
            ("Requests per second", "reqps", [(total("requests_total", "outcome"), "{{outcome}}")]),
            (
                "Refused and put back per second",
                "short",
                [
                    (total("admission_rejections_total"), "refused, queue full"),
                    (total("preemptions_total"), "preempted"),
                    (total("abandoned_steps_total"), "steps without memory"),
                    (total("non_finite_requests_total"), "NaN or infinity"),
                    (total("engine_restarts_total"), "engines started again"),
                ],
            ),
            (
                "Ends of answers",
                "short",
                [(total("choices_finished_total", "reason"), "{{reason}}")],
            ),
        ],
    ),
    (
        "Latency",
        [
            ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
            ("Between tokens", "s", quantiles("inter_token_latency_seconds")),
            ("Whole request", "s", quantiles("request_duration_seconds")),
            ("In the queue", "s", quantiles("request_queue_seconds")),
            ("In prefill", "s", quantiles("request_prefill_seconds")),
            (
                "Longest gap of a minute, latest step",
                "s",
                [
                    ("max(metainfer_longest_decode_gap_seconds)", "gap"),
                    ("max(metainfer_last_step_seconds)", "step"),
                ],
            ),
        ],
    ),
    (
        "Cache and drafts",
        [
            ("Cache in use", "percentunit", [("metainfer_kv_cache_usage_ratio", "{{instance}}")]),
            (
                "Prompt tokens found in the cache",
                "percentunit",
                [(share("prefix_cache_hit_tokens_total", "prefix_cache_query_tokens_total"), "")],
            ),
            (
                "Drafts accepted",
                "percentunit",
                [(share("accepted_draft_tokens_total", "drafted_tokens_total"), "")],
            ),
        ],
    ),
    (
        "What was decided and found at the start",
        [
            (
                "Start-up",
                "s",
                [
                    ("metainfer_start_phase_seconds", "{{phase}}"),
                    ("max(metainfer_engine_restart_seconds)", "latest restart"),
                ],
            ),
            (
                "Memory",
                "bytes",
                [
                    ("sum by (pool) (metainfer_memory_planned_bytes)", "{{pool}}, planned"),
                    ("sum by (pool) (metainfer_memory_held_bytes)", "{{pool}}, held"),
                ],
            ),
            (
                "Ops by quality of the kernel; verified",
                "short",
                [
                    ("metainfer_ops", "{{quality}}"),
                    ("min(metainfer_plan_verified)", "1: this plan is verified"),
                ],
            ),
            (
                "Lanes missing per link",
                "short",
                [("metainfer_link_max_lanes - metainfer_link_lanes", "{{source}} to {{target}}")],
            ),
            (
                "Alarms",
                "short",
                [
                    ("max(metainfer_draft_alarm)", "drafts in vain"),
                    ("max(metainfer_prefix_cache_alarm)", "cache in vain"),
                ],
            ),
            ("Spans of traces", "short", [(total("trace_spans_total", "result"), "{{result}}")]),
        ],
    ),
]


def selected(expression: str) -> str:
    """`expression` with the chosen models and instances put into every selector."""
    import re

    return re.sub(r"(metainfer_\w+)", rf"\1{{{MODEL}}}", expression)


def panel(number: int, at: tuple[int, int], title: str, unit: str, curves: Curves) -> Any:
    return {
        "id": number,
        "title": title,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": at[0], "y": at[1], "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        },
        "targets": [
            {
                "refId": chr(65 + place),
                "datasource": SOURCE,
                "expr": selected(expression),
                "legendFormat": legend or title,
            }
            for place, (expression, legend) in enumerate(curves)
        ],
    }


def variable(name: str, query: str) -> Any:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> Any:
    """The document as Grafana imports it."""
    panels: list[Any] = []
    y = 0
    for heading, row in ROWS:
        grid = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": heading, "gridPos": grid, "panels": []}
        )
        y += 1
        for place, (title, unit, curves) in enumerate(row):
            at = (place % 3 * WIDTH, y + place // 3 * HEIGHT)
            panels.append(panel(len(panels) + 1, at, title, unit, curves))
        y += -(-len(row) // 3) * HEIGHT
    return {
        "title": "Meta-Infer",
        "uid": "metainfer",
        "tags": ["metainfer"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                variable("model", "label_values(metainfer_ready, model_name)"),
                variable("instance", "label_values(metainfer_ready, instance)"),
            ]
        },
        "panels": panels,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
