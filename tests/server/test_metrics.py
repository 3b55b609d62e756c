"""The metrics page: content type, promtool's rules, and numbers that add up."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from fake_server import Running, call, chat_body, fake_server
from prometheus_client.parser import text_string_to_metric_families

from metainfer.server.metrics import Histogram
from metainfer.server.metrics_vllm import ALIASES


def test_page_is_clean(server: Running) -> None:
    call(server.port, "POST", "/v1/chat/completions", chat_body("say:abc"))
    page = call(server.port, "GET", "/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(page.raw.decode()))
    assert len(families) > 12
    for family in families:  # the rules of `promtool check metrics`
        assert re.fullmatch(r"metainfer_[a-z0-9_]+", family.name), family.name
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        assert not re.search(r"_(gauge|counter|histogram|summary)$", family.name)
        assert not re.search(r"(milliseconds|minutes|kilobytes|percent|_ms)$", family.name)
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        else:
            assert not family.name.endswith(("_total", "_count", "_sum", "_bucket"))
    if shutil.which("promtool"):
        subprocess.run(["promtool", "check", "metrics"], input=page.raw, check=True)


def test_numbers_add_up() -> None:
    with fake_server() as running:
        for _ in range(3):
            call(running.port, "POST", "/v1/chat/completions", chat_body("say:abcde"))
        call(running.port, "POST", "/v1/completions", {"model": "fake", "prompt": "fail: x"})
        page = call(running.port, "GET", "/metrics").raw.decode()
    values = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert values["metainfer_requests_total", "finished"] == 3
    assert values["metainfer_requests_total", "engine_error"] == 1
    assert values["metainfer_time_to_first_token_seconds_count", None] == 4
    assert values["metainfer_inter_token_latency_seconds_count", None] == 3 * 4 + 1
    assert values["metainfer_request_generated_tokens_sum", None] == 3 * 5 + 2
    assert values["metainfer_request_queue_seconds_count", None] == 4
    assert values["metainfer_request_prefill_seconds_count", None] == 4
    first = values["metainfer_time_to_first_token_seconds_sum", None]
    decode = values["metainfer_request_decode_seconds_sum", None]
    assert values["metainfer_request_decode_seconds_count", None] == 3  # one did not finish
    assert values["metainfer_request_time_per_output_token_seconds_count", None] == 3
    assert values["metainfer_request_time_per_output_token_seconds_sum", None] == pytest.approx(
        decode / 4
    )
    assert values["metainfer_request_duration_seconds_sum", None] >= first + decode
    assert values["metainfer_admission_rejections_total", None] == 0
    assert values["metainfer_generated_tokens_total", None] >= 17
    assert values["metainfer_ready", None] == 1


def test_vllm_names_say_what_ours_say() -> None:
    """Asked for only, without a name whose meaning we lack."""
    with fake_server(["--vllm-metrics"]) as running:
        call(running.port, "POST", "/v1/chat/completions", chat_body("say:abcde"))
        call(running.port, "POST", "/v1/chat/completions", chat_body("x", max_tokens=3))
        page = call(running.port, "GET", "/metrics").raw.decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    theirs = {name for name in families if name.startswith("vllm:")}
    assert theirs == {*(f"vllm:{name}" for name in ALIASES.values()), "vllm:request_success"}
    for ours, alias in ALIASES.items():
        mine, other = families[f"metainfer_{ours}"], families[f"vllm:{alias}"]
        assert mine.type == other.type
        assert [s.value for s in mine.samples] == [s.value for s in other.samples]
        assert all(s.labels["model_name"] == "fake" for s in other.samples)
        assert all(s.labels["engine"] == "0" for s in other.samples)
    reasons = {
        sample.labels["finished_reason"]: sample.value
        for sample in families["vllm:request_success"].samples
        if sample.name.endswith("_total")
    }
    assert reasons == {"stop": 1, "length": 1}


@pytest.mark.parametrize(("value", "place"), [(0.5, 0), (1.0, 0), (1.01, 1), (2.0, 1), (9.0, 2)])
def test_histogram_bounds_are_inclusive(value: float, place: int) -> None:
    histogram = Histogram("x", "x", (1.0, 2.0))
    histogram.observe(value)
    rows, total = histogram.buckets()
    assert [count for _, count in rows] == [float(i >= place) for i in range(3)]
    assert [bound for bound, _ in rows] == ["1.0", "2.0", "+Inf"]
    assert total == value


def test_histogram_splits_a_step_over_its_tokens() -> None:
    histogram = Histogram("x", "x", (1.0, 2.0))
    histogram.observe(3.0, 3)
    rows, total = histogram.buckets()
    assert rows[0] == ("1.0", 3) and total == 3.0
