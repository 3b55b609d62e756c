"""The page for Prometheus: counters and gauges of the engine, histograms of requests.

Histograms are plain lists here, because an observation happens per token; prometheus-client only
prints the page. Names carry the prefix ``metainfer_`` and units; no label holds user text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from metainfer.engine.protocol import EngineInfo, EngineStats
from metainfer.server.metrics_facts import facts, gauge
from metainfer.server.metrics_vllm import adapters_info, aliases
from metainfer.server.recent import Window
from metainfer.server.restarts import Restarts

if TYPE_CHECKING:
    from metainfer.server.prepare import Job, Times

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = tuple(2.0**power for power in range(0, 21, 2))


class Histogram:
    """Counts per bucket; an observation costs a bisection and three additions.

    `recent` is told the same, for percentiles of the last minutes.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        bounds: tuple[float, ...],
        recent: Window | None = None,
    ) -> None:
        self.name = name
        self.help_text = help_text
        self.recent = recent
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`value` split evenly over `count` observations (a step that brought several tokens)."""
        each = value / count
        self._counts[bisect_left(self._bounds, each)] += count
        self._sum += value
        if self.recent is not None:
            self.recent.observe(each, count)

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative buckets with their upper bounds as text, and the sum."""
        total = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
        return rows, self._sum


_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("requests_running", "Sequences in the running batch.", lambda s: s.running),
    ("requests_waiting", "Sequences waiting for a place in the batch.", lambda s: s.waiting),
    ("kv_cache_usage_ratio", "Fraction of cache pages in use.", lambda s: s.kv_used),
    (
        "longest_decode_gap_seconds",
        "Longest wait between two tokens of a running sequence.",
        lambda s: s.longest_decode_gap_s,
    ),
    ("last_step_seconds", "Duration of the latest engine step.", lambda s: s.last_step_s),
    (
        "draft_alarm",
        "1 while many drafted tokens were verified and none was accepted.",
        lambda s: float(bool(s.draft_alarm)),
    ),
    ("draft_depth", "Drafts per sequence that the latest step asked for.", lambda s: s.draft_depth),
    (
        "draft_gain",
        "Decoded tokens per second over those without drafts, with --draft auto; 0 elsewhere.",
        lambda s: s.draft_gain or 0.0,
    ),
    (
        "prefix_cache_alarm",
        "1 while many look-ups that could have hit the prefix cache met nothing.",
        lambda s: float(bool(s.cache_alarms)),
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("engine_steps", "Engine steps.", lambda s: s.steps),
    ("preemptions", "Sequences put back to make room.", lambda s: s.preemptions),
    ("prompt_tokens", "Prompt tokens computed.", lambda s: s.prompt_tokens),
    ("generated_tokens", "Tokens generated.", lambda s: s.generated_tokens),
    ("drafted_tokens", "Tokens proposed ahead and verified.", lambda s: s.drafted_tokens),
    ("accepted_draft_tokens", "Drafted tokens that were right.", lambda s: s.accepted_drafts),
    (
        "prefix_cache_query_tokens",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.cache_query_tokens,
    ),
    (
        "prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache.",
        lambda s: s.cache_hit_tokens,
    ),
    (
        "non_finite_requests",
        "Requests ended by NaN or infinity in their numbers.",
        lambda s: s.non_finite,
    ),
    ("abandoned_steps", "Steps for which memory did not suffice.", lambda s: s.abandoned_steps),
    (
        "overlapped_steps",
        "Steps launched before the one ahead of them was read.",
        lambda s: s.overlapped_steps,
    ),
    (
        "emulated_wait_seconds",
        "Time in collectives whose peers are a stand-in (--rank-of), none of it overlapped.",
        lambda s: s.emulated_wait_s,
    ),
)


class Metrics:
    """All metrics of one server. `stats` and `status` are asked when the page is read."""

    def __init__(
        self,
        model: str,
        stats: Callable[[], EngineStats],
        status: Callable[[], str],
        *,
        vllm_names: bool = False,
    ) -> None:
        """`vllm_names`: give what means the same under vLLM's names, too."""
        self._vllm_names = vllm_names
        self._finished: dict[str, int] = {}
        self._model = model
        self._stats = stats
        self._status = status
        self.info: EngineInfo | None = None  # once the engine is ready
        self.fingerprint = ""
        self.spans: Callable[[], dict[str, int]] = dict  # result -> spans, where traces are on
        self.admission_rejections = 0
        self.restarts = Restarts(0)
        self.recent_first_token = Window()
        self.recent_token_gap = Window()
        self.recent_queue = Window()
        self.first_token = Histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token.",
            _SECONDS,
            self.recent_first_token,
        )
        self.token_gap = Histogram(
            "inter_token_latency_seconds",
            "Between two tokens of one choice.",
            _SECONDS,
            self.recent_token_gap,
        )
        self.queue = Histogram(
            "request_queue_seconds",
            "A choice's wait from the scheduler's queue to its first step.",
            _SECONDS,
            self.recent_queue,
        )
        self._prefill = Histogram(
            "request_prefill_seconds", "From a choice's first step to its first token.", _SECONDS
        )
        self._decode = Histogram(
            "request_decode_seconds", "From a finished choice's first token to its last.", _SECONDS
        )
        self._per_token = Histogram(
            "request_time_per_output_token_seconds",
            "Mean time between two tokens of a finished choice.",
            _SECONDS,
        )
        self._duration = Histogram(
            "request_duration_seconds", "From arrival to the last token.", _SECONDS
        )
        self._prompt = Histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self._generated = Histogram(
            "request_generated_tokens", "Generated tokens per request.", _TOKENS
        )
        self.outcomes: dict[str, int] = {"finished": 0, "cancelled": 0}

    def first_tokens(self, job: Job, times: Times) -> None:
        """A choice has its first tokens."""
        self.first_token.observe(times.first - job.arrived)
        if times.queue_s is not None:
            self.queue.observe(times.queue_s)
            self._prefill.observe(times.prefill_s)

    def request_done(self, job: Job, outcome: str, seconds: float) -> None:
        """One HTTP request that reached the engine is over."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        for choice in job.choices:
            reason = choice.text.finish
            if reason is not None:
                self._finished[reason] = self._finished.get(reason, 0) + 1
                if choice.times.first:
                    decode_s = choice.times.last - choice.times.first
                    self._decode.observe(decode_s)
                    if choice.text.completion_tokens > 1:
                        self._per_token.observe(decode_s / (choice.text.completion_tokens - 1))
        self._duration.observe(seconds)
        self._prompt.observe(float(sum(map(len, job.prompts))))
        self._generated.observe(float(sum(c.text.completion_tokens for c in job.choices)))

    def page(self) -> bytes:
        """The page, in the text format 0.0.4."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self.families))
        return generate_latest(registry)

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        return (
            self.first_token,
            self.token_gap,
            self.queue,
            self._prefill,
            self._decode,
            self._per_token,
            self._duration,
            self._prompt,
            self._generated,
        )

    def families(self) -> Iterator[Any]:
        """Every family of prometheus-client's, those without samples too."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        names, values = ["model_name"], [self._model]
        stats = self._stats()
        for name, text, read in _GAUGES:
            yield gauge(name, text, self._model, [((), read(stats))])
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(f"metainfer_{name}", text, labels=names)
            counter.add_metric(values, read(stats))
            yield counter
        counted: tuple[tuple[str, str, str, dict[str, int]], ...] = (
            ("requests", "Requests by outcome.", "outcome", self.outcomes),
            ("choices_finished", "Choices by finish reason.", "reason", self._finished),
            (
                "step_waits",
                "Steps that waited until the one ahead of them was read, by reason.",
                "reason",
                stats.step_waits,
            ),
            (
                "step_draws",
                "Draws of captured steps: likeliest, captured, or why they ran op by op.",
                "how",
                stats.step_draws,
            ),
            ("trace_spans", "Spans by what became of them.", "result", self.spans()),
        )
        for name, text, label, counts in counted:
            family = CounterMetricFamily(f"metainfer_{name}", text, labels=[*names, label])
            for key, count in counts.items():
                family.add_metric([*values, key], count)
            yield family
        refused = CounterMetricFamily(
            "metainfer_admission_rejections", "Requests refused: the queue was full.", labels=names
        )
        refused.add_metric(values, self.admission_rejections)
        yield refused
        restarted = CounterMetricFamily(
            "metainfer_engine_restarts", "Engines started again after a death.", labels=names
        )
        restarted.add_metric(values, self.restarts.count)
        yield restarted
        latest = [((), self.restarts.last_s)] if self.restarts.count else []
        text = "From the engine's latest death until it was ready again."
        yield gauge("engine_restart_seconds", text, self._model, latest)
        ready = [((), float(self._status() == "ready"))]
        yield gauge("ready", "1 when requests are served.", self._model, ready)
        yield from facts(self._model, self.info, self.fingerprint)
        for histogram in self.histograms:
            buckets = HistogramMetricFamily(
                f"metainfer_{histogram.name}", histogram.help_text, labels=names
            )
            buckets.add_metric(values, *histogram.buckets())
            yield buckets
        if self._vllm_names:
            yield from aliases(
                self._model,
                [(name, text, read(stats)) for name, text, read in _GAUGES],
                [
                    *((name, text, read(stats)) for name, text, read in _COUNTERS),
                    ("admission_rejections", refused.documentation, self.admission_rejections),
                ],
                self.histograms,
                self._finished,
            )
            yield from adapters_info(self.info, stats)


class _Collector:
    def __init__(self, families: Callable[[], Iterable[Any]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Any]:
        return self._families()
