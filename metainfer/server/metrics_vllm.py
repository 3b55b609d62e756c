"""Names of vLLM's metrics for what we measure, behind ``--metrics-compat vllm``.

Dashboards, autoscalers and load balancers read these. Only what has the same meaning here is
given; nothing is filled with zeros.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metainfer.engine.protocol import EngineInfo, EngineStats
    from metainfer.server.metrics import Histogram

#: our name -> theirs
ALIASES = {
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "kv_cache_usage_ratio": "kv_cache_usage_perc",
    "preemptions": "num_preemptions",
    "prompt_tokens": "prompt_tokens",
    "generated_tokens": "generation_tokens",
    "prefix_cache_query_tokens": "prefix_cache_queries",
    "prefix_cache_hit_tokens": "prefix_cache_hits",
    "drafted_tokens": "spec_decode_num_draft_tokens",
    "accepted_draft_tokens": "spec_decode_num_accepted_tokens",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "admission_rejections": "admission_rejections",
    "request_queue_seconds": "request_queue_time_seconds",
    "request_prefill_seconds": "request_prefill_time_seconds",
    "request_decode_seconds": "request_decode_time_seconds",
    "request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "request_duration_seconds": "e2e_request_latency_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generated_tokens": "request_generation_tokens",
}
#: our finish reasons -> theirs; a call is a stop there
_REASONS = {"tool_calls": "stop"}


def aliases(
    model: str,
    gauges: Iterable[tuple[str, str, float]],
    counters: Iterable[tuple[str, str, float]],
    histograms: Iterable[Histogram],
    finished: dict[str, int],
) -> Iterator[Any]:
    """Metric families; gauges and counters are (our name, help, value)."""
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    names, values = ["model_name", "engine"], [model, "0"]
    for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, text, value in rows:
            if name in ALIASES:
                family = kind(f"vllm:{ALIASES[name]}", text, labels=names)
                family.add_metric(values, value)
                yield family
    for histogram in histograms:
        buckets = HistogramMetricFamily(
            f"vllm:{ALIASES[histogram.name]}", histogram.help_text, labels=names
        )
        buckets.add_metric(values, *histogram.buckets())
        yield buckets
    reasons: dict[str, int] = {}
    for reason, count in finished.items():
        name = _REASONS.get(reason, reason)
        reasons[name] = reasons.get(name, 0) + count
    success = CounterMetricFamily(
        "vllm:request_success", "Finished choices by reason.", labels=[*names, "finished_reason"]
    )
    for reason, count in reasons.items():
        success.add_metric([*values, reason], count)
    yield success


def adapters_info(info: EngineInfo | None, stats: EngineStats) -> Iterator[Any]:
    """``vllm:lora_requests_info``: names in labels, the time of reading as value, as routers that
    place requests by adapter expect it. Nothing where no adapter is loaded."""
    from prometheus_client.core import GaugeMetricFamily

    plan = {} if info is None else info.plan.get("plan", info.plan)
    loaded = plan.get("adapters", ())
    if loaded:
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        text = "Adapters of running and of waiting requests."
        family = GaugeMetricFamily("vllm:lora_requests_info", text, labels=labels)
        lists = [",".join(names) for names in (stats.running_adapters, stats.waiting_adapters)]
        family.add_metric([str(len(loaded)), *lists], time.time())
        yield family
