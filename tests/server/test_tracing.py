"""Traces against a collector of our own: what is in them, what is not, and what it may cost."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import Running, call, chat_body, eventually, fake_server

from metainfer.core.errors import UsageError
from metainfer.server import tracing
from metainfer.server.tracing import Traces, incoming, traces_url

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="extra otel")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector:
    """An OTLP collector over HTTP. `open` is cleared to make it hang, `status` set to refuse."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()
        self.status = 200
        self.open = threading.Event()
        self.open.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.open.wait(600)
                if collector.status == 200:
                    collector.bodies.append(body)
                    collector.paths.add(self.path)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *words: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def spans(self) -> list[Any]:
        return [
            span
            for body in list(self.bodies)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.open.set()
        collector.http.shutdown()
        collector.http.server_close()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = (
            [each.string_value for each in value.values] if kind == "array_value" else value
        )
    return found


def chat(port: int, body: dict[str, Any], **headers: str) -> int:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return call(port, "POST", "/v1/chat/completions", body, given).status


def spans_of(running: Running, result: str) -> float:
    page = call(running.port, "GET", "/metrics").raw.decode()
    start = f'metainfer_trace_spans_total{{model_name="fake",result="{result}"}} '
    return float(next(line for line in page.splitlines() if line.startswith(start))[len(start) :])


def counted(traces: Traces, result: str, count: int) -> bool:
    return traces.counts()[result] == count


def test_what_a_span_tells_and_what_it_does_not() -> None:
    with collecting() as collector, fake_server(["--otlp", collector.url]) as running:
        before = time.time_ns()
        body = chat_body("say:secret-words", temperature=0.5, max_tokens=40, n=2, user="jane")
        assert chat(
            running.port, body, traceparent=f"00-{TRACE}-{PARENT}-01", x_request_id="id-of-jane"
        ) == 200  # fmt: skip
        legacy = {"model": "fake", "prompt": "fail: secret"}
        assert call(running.port, "POST", "/v1/completions", legacy).status == 500
        assert chat(running.port, chat_body("x"), traceparent=f"00-{TRACE}-{PARENT}-00") == 200
        assert chat(running.port, chat_body("x", max_tokens=3), traceparent="00-junk") == 200
        assert eventually(lambda: len(collector.spans()) >= 3, 60)
        assert eventually(lambda: spans_of(running, "exported") == 3, 60)  # one asked not to be
        assert running.stop() == 0
    assert collector.paths == {"/v1/traces"}
    spans = {span.name: span for span in collector.spans() if span.parent_span_id}
    (first,) = spans.values()
    assert first.name == "chat fake"
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    told = attributes(first)
    times = {k: v for k, v in told.items() if ".latency." in k}
    for key in times:
        del told[key]
    assert told.pop("gen_ai.request.id").startswith("chatcmpl-")
    prompt = told.pop("gen_ai.usage.prompt_tokens")
    assert told.pop("gen_ai.usage.cached_tokens") == prompt // 16 * 16 > 0
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.n": 2,
        "gen_ai.response.finish_reasons": ["stop", "stop"],
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.completion_tokens": 2 * len("secret-words"),
    }
    assert set(times) == {
        f"gen_ai.latency.{name}"
        for name in ("e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill",
                     "time_in_model_decode")
    }  # fmt: skip
    assert 0 < times["gen_ai.latency.time_to_first_token"] <= times["gen_ai.latency.e2e"]
    assert [event.name for event in first.events] == ["queue", "prefill", "decode"]
    order = [first.start_time_unix_nano, *(e.time_unix_nano for e in first.events)]
    assert order == sorted(order) and before <= order[0] and order[-1] <= first.end_time_unix_nano
    seconds = (first.end_time_unix_nano - first.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(times["gen_ai.latency.e2e"], abs=1e-4)

    roots = [span for span in collector.spans() if not span.parent_span_id]
    failed = next(span for span in roots if span.name == "text_completion fake")
    assert attributes(failed)["error.type"] == "engine_error" and failed.status.code == 2
    assert len(roots) == 2 and all(span.trace_id.hex() != TRACE for span in roots)
    sent = b"".join(collector.bodies)
    for word in (b"secret", b"say:", b"jane"):
        assert word not in sent


def test_a_collector_that_is_down_costs_one_warning_and_is_counted(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "EXPORT_S", 30.0)
    monkeypatch.setattr(tracing, "DELAY_S", 0.05)
    with collecting() as collector, caplog.at_level(logging.WARNING):
        collector.status = 400
        traces = Traces(collector.url, "m")
        for lost in (1, 2, 3):
            traces.request(job(), "finished")
            assert eventually(partial(counted, traces, "lost", lost), 60)
        collector.status = 200
        traces.request(job(), "finished")
        assert eventually(partial(counted, traces, "exported", 1), 60)
        traces.close(60)
    assert traces.counts() == {"exported": 1, "lost": 3, "dropped": 0}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "takes no traces; serving goes on" in messages[0] and "takes traces again" in messages[1]


def test_a_collector_that_hangs_holds_nobody_up() -> None:
    """Requests end, and the server stops in its time, while the exporter waits."""
    with collecting() as collector, fake_server(["--otlp", collector.url]) as running:
        collector.open.clear()
        for _ in range(20):
            assert chat(running.port, chat_body("say:abc")) == 200
        assert spans_of(running, "exported") == 0
        began = time.monotonic()
        assert running.stop(timeout=60) == 0
        assert time.monotonic() - began < 30  # the SDK alone would wait for its 30 s


def test_closing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_S", 25.0)
    with collecting() as collector:
        collector.open.clear()
        traces = Traces(collector.url, "m")
        traces.request(job(), "finished")
        began = time.monotonic()
        traces.close(0.2)
        assert time.monotonic() - began < 15


def job() -> Any:
    """As much of a finished job as a span asks for."""
    params = SimpleNamespace(max_tokens=4, temperature=1.0, top_p=1.0)
    times = SimpleNamespace(submitted=1.0, first=1.5, last=2.0, queue_s=0.25, prefill_s=0.25)
    text = SimpleNamespace(finish="stop")
    choice = SimpleNamespace(times=times, text=text, request=SimpleNamespace(params=params))
    usage = {
        "prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    return SimpleNamespace(
        id="chatcmpl-1", model="m", arrived=0.5, prompts=[(1,)], choices=[choice], usage=usage
    )


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_OPEN", 10)
    monkeypatch.setattr(tracing, "DELAY_S", 60.0)
    monkeypatch.setattr(tracing, "BATCH", 10)
    monkeypatch.setattr(tracing, "EXPORT_S", 60.0)
    with collecting() as collector:
        collector.open.clear()
        traces = Traces(collector.url, "m")
        for _ in range(25):
            traces.request(job(), "finished")
        assert traces.counts() == {"exported": 0, "lost": 0, "dropped": 15}
        collector.open.set()
        traces.close(60)
        assert traces.counts() == {"exported": 10, "lost": 0, "dropped": 15}
        assert len(collector.spans()) == 10


def test_a_parent_that_is_not_sampled_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_OPEN", 1)
    monkeypatch.setattr(tracing, "BATCH", 1)
    with collecting() as collector:
        traces = Traces(collector.url, "m")
        token = incoming.set((f"00-{TRACE}-{PARENT}-00".encode(), b""))
        for _ in range(5):
            traces.request(job(), "finished")
        incoming.reset(token)
        traces.request(job(), "cancelled")
        traces.close(60)
        (span,) = collector.spans()
    assert attributes(span)["metainfer.outcome"] == "cancelled" and span.status.code == 0
    assert traces.counts() == {"exported": 1, "lost": 0, "dropped": 0}


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("https://a/otlp/v1/traces", "https://a/otlp/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_the_path_is_added_where_there_is_none(given: str, url: str) -> None:
    assert traces_url(given) == url


@pytest.mark.parametrize(
    "given", ["", "a:4318", "grpc://a:4317", "http://", "http://a:99999", "/x"]
)
def test_what_is_no_url_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="is no HTTP URL"):
        traces_url(given)


def test_without_the_extra_the_flag_names_it() -> None:
    program = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Wall())
from metainfer.cli.main import main
sys.exit(main())
"""
    command = [sys.executable, "-c", program, "serve", "random:tiny-qwen3", "--port", "0"]
    command += ["--otlp-endpoint", "http://127.0.0.1:4318"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "pip install 'metainfer[otel]'" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
