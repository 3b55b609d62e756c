"""OpenTelemetry behind one file (extra ``otel``): a span per request that reached the engine.

A span is made when its request is over, so no token pays for it; times and counts go in, text of a
user never does. The SDK exports on its own thread from a bounded queue. A collector that is down,
slow or wrong is one warning; what it costs is counted, and nobody waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from metainfer.core.errors import UsageError, UserError

if TYPE_CHECKING:
    from metainfer.server.prepare import Job

MOST_OPEN = 4096
"""Spans that may wait for the collector; more are dropped and counted."""
BATCH = 512
EXPORT_S = 5.0
"""After which one attempt to hand over a batch, its repetitions included, is given up."""
DELAY_S = 1.0

incoming: ContextVar[tuple[bytes, bytes]] = ContextVar("incoming", default=(b"", b""))
"""W3C ``traceparent`` and ``tracestate`` of the request that runs in this context."""

_log = logging.getLogger("metainfer.server")


def traces_url(endpoint: str) -> str:
    """`endpoint`, with ``/v1/traces`` where it names no path.

    Raises:
        UsageError: it is no HTTP URL.
    """
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(
            f"--otlp-endpoint {endpoint!r} is no HTTP URL.", "Write it like http://127.0.0.1:4318."
        )
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


class _Exporter:
    """What the SDK's thread hands batches to: the OTLP exporter, with a tally."""

    def __init__(self, inner: Any, url: str) -> None:
        self._inner = inner
        self._url = url
        self._lock = threading.Lock()
        self._down = False
        self.waiting = 0
        self.counts = {"exported": 0, "lost": 0, "dropped": 0}

    def admit(self) -> bool:
        """Whether one more span may wait; if not it is counted as dropped."""
        with self._lock:
            full = self.waiting >= MOST_OPEN
            if full:
                self.counts["dropped"] += 1
            else:
                self.waiting += 1
            return not full

    def export(self, spans: Sequence[Any]) -> Any:
        result = self._inner.export(spans)
        good = result.name == "SUCCESS"
        with self._lock:
            self.waiting -= len(spans)
            self.counts["exported" if good else "lost"] += len(spans)
        if good == self._down:
            self._down = not good
            told = "takes traces again" if good else "takes no traces; serving goes on without"
            _log.warning("The collector at %s %s.", self._url, told)
        return result

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def shutdown(self) -> None:
        self._inner.shutdown()


class Traces:
    """Spans of one server, on their way to the collector at `endpoint`."""

    def __init__(self, endpoint: str, model: str) -> None:
        """`model`: the name that is served first.

        Raises:
            UsageError: the endpoint is no HTTP URL.
            UserError: OpenTelemetry is not installed.
        """
        url = traces_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise UserError(
                "--otlp-endpoint needs OpenTelemetry, which is not installed.",
                "pip install 'metainfer[otel]'.",
                code="extra_missing",
            ) from error
        import metainfer

        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the tally speaks for them
        self._model = model
        self._exporter = _Exporter(OTLPSpanExporter(endpoint=url, timeout=EXPORT_S), url)
        about = {"service.name": "metainfer", "service.version": metainfer.__version__}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,  # type: ignore[arg-type]
                max_queue_size=MOST_OPEN,
                max_export_batch_size=BATCH,
                schedule_delay_millis=1000 * DELAY_S,
            )
        )
        self._tracer = self._provider.get_tracer("metainfer", metainfer.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def counts(self) -> dict[str, int]:
        """Spans ``exported``, ``lost`` (not taken by the collector), ``dropped`` (too many)."""
        return dict(self._exporter.counts)

    def request(self, job: Job, outcome: str) -> None:
        """The span of a request that is over now."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        parent, state = incoming.get()
        carrier = {"traceparent": parent.decode("latin-1"), "tracestate": state.decode("latin-1")}
        shift = time.time_ns() - time.perf_counter_ns()

        def at(seconds: float) -> int:
            return int(seconds * 1e9) + shift

        now = time.perf_counter()
        operation = "text_completion" if job.id.startswith("cmpl-") else "chat"
        span = self._tracer.start_span(
            f"{operation} {job.model}",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            start_time=at(job.arrived),
        )
        if not span.is_recording() or not self._exporter.admit():
            return
        span.set_attributes({"gen_ai.operation.name": operation, **self._attributes(job, now)})
        times = min((c.times for c in job.choices), key=lambda each: each.first or now)
        if times.submitted:
            span.add_event("queue", timestamp=at(times.submitted))
        if times.queue_s is not None:
            span.add_event("prefill", timestamp=at(times.submitted + times.queue_s))
        if times.first:
            span.add_event("decode", timestamp=at(times.first))
        if outcome == "cancelled":
            span.set_attribute("metainfer.outcome", outcome)
        elif outcome != "finished":
            span.set_attribute("error.type", outcome)
            span.set_status(Status(StatusCode.ERROR))
        span.end(at(now))

    def _attributes(self, job: Job, now: float) -> dict[str, Any]:
        """Names of OpenTelemetry's conventions for generative models, as other engines send them;
        times in seconds."""
        params = job.choices[0].request.params
        usage = job.usage
        found: dict[str, Any] = {
            "gen_ai.request.id": job.id,
            "gen_ai.request.model": job.model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": len(job.choices) // len(job.prompts),
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [
                choice.text.finish for choice in job.choices if choice.text.finish is not None
            ],
            "gen_ai.usage.num_sequences": len(job.choices),
            "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
            "gen_ai.usage.cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "gen_ai.usage.completion_tokens": usage["completion_tokens"],
            "gen_ai.latency.e2e": now - job.arrived,
        }
        times = min((c.times for c in job.choices), key=lambda each: each.first or now)
        if times.first:
            found["gen_ai.latency.time_to_first_token"] = times.first - job.arrived
            last = max(choice.times.last for choice in job.choices)
            found["gen_ai.latency.time_in_model_decode"] = last - times.first
        if times.queue_s is not None:
            found["gen_ai.latency.time_in_queue"] = times.queue_s
            found["gen_ai.latency.time_in_model_prefill"] = times.prefill_s
        return found

    def close(self, grace_s: float = 3.0) -> None:
        """Hand over what waits, for at most `grace_s` seconds. Blocks: call it off the loop."""
        last = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        last.start()
        last.join(grace_s)
        if last.is_alive():
            self._exporter.shutdown()
