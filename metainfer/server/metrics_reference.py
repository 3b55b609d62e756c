"""``docs/metrics.md``, printed from the families themselves: ``python -m`` this module."""

from __future__ import annotations

from typing import Any

from metainfer.engine.protocol import EngineStats
from metainfer.server.metrics import Metrics
from metainfer.server.metrics_vllm import ALIASES

_HEAD = """\
# Metrics

`GET /metrics` gives Prometheus' text format 0.0.4; with `--api-key` it needs the key. This page is
printed from the code (`python -m metainfer.server.metrics_reference > docs/metrics.md`), and a test
holds it to that.

What is unknown has no sample: a pool whose bytes nobody counts, a link that nobody could read. No
label holds text of a user. Every metric has the label `model_name`, the first name that is served.
Dashboard, alert rules and traces: [monitoring.md](monitoring.md).

| metric | type | further labels | meaning |
|---|---|---|---|
"""
_VLLM = """
## Under vLLM's names

`--metrics-compat vllm` gives these besides, with the labels `model_name` and `engine` ("0"), for
dashboards, autoscalers and load balancers that read them. Only what has the same meaning is there;
nothing is filled with zeros.

| vLLM's name | ours |
|---|---|
"""
_SUFFIX = {"counter": "_total"}


def families() -> list[Any]:
    """Every family of a server without a history, in the page's order."""
    return list(Metrics("", EngineStats, lambda: "starting").families())


def reference() -> str:
    """The page."""
    rows = []
    kinds = {}
    for family in families():
        suffix = kinds[family.name] = _SUFFIX.get(family.type, "")
        labels = ", ".join(f"`{name}`" for name in family._labelnames if name != "model_name")
        rows.append(
            f"| `{family.name}{suffix}` | {family.type} | {labels} | {family.documentation} |"
        )
    theirs = [
        f"| `vllm:{alias}{kinds[f'metainfer_{ours}']}` | "
        f"`metainfer_{ours}{kinds[f'metainfer_{ours}']}` |"
        for ours, alias in ALIASES.items()
    ]
    theirs.append(
        "| `vllm:request_success_total` | `metainfer_choices_finished_total`, "
        "`reason` as `finished_reason` |"
    )
    return _HEAD + "\n".join(rows) + "\n" + _VLLM + "\n".join(theirs) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
