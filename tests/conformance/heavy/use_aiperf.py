"""aiperf (NVIDIA's benchmark client): chat, completions, Responses and Messages streamed; it counts
tokens itself, scrapes `/metrics` and cancels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

#: With transformers 5 aiperf 0.13 counts prompts without the chat template, whatever it is told.
REQUIRES = ["aiperf>=0.13", "transformers<5"]
REPORTS = ["aiperf", "transformers"]
SERVER = ["--context", "2048", "--concurrency", "4"]

import checks  # noqa: E402

PROGRAM = Path(sys.executable).parent / "aiperf"
REQUESTS, PROMPT, ANSWER = 6, 96, 12
#: Greedy, so that one seed gives one run.
GREEDY = ["--extra-inputs", "temperature:0"]
#: aiperf reads the usage of Responses that end by themselves only: an answer must have an end.
VERSE = "Half a league, half a league, half a league onward, all in the valley of Death."
FORM = {"type": "json_schema", "name": "verse", "schema": {"enum": [VERSE]}}


def profile(
    endpoint: str,
    *flags: str,
    model: str = checks.MODEL,
    answer: int = ANSWER,
    fails: bool = False,
) -> tuple[dict[str, Any], Path]:
    """One streamed run; aiperf's summary, empty when all `fails`, and the folder of its files."""
    folder = Path(tempfile.mkdtemp(dir=".", prefix=f"{endpoint}-")).resolve()
    command = [str(PROGRAM), "profile", "--url", checks.URL, "--endpoint-type", endpoint]
    command += ["--model", model, "--streaming"]
    command += ["--tokenizer", checks.TOKENIZER, "--random-seed", "7"]
    command += ["--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(answer)]
    command += ["--concurrency", "2", "--ui", "none", "--no-gpu-telemetry"]
    command += ["--workers-max", "2", "--artifact-dir", str(folder)]
    # With HF_HUB_OFFLINE it takes a tokenizer's folder for a name and refuses it.
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run([*command, *flags], env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, (done.stdout + done.stderr)[-1000:]
    summary = folder / "profile_export_aiperf.json"
    return {} if fails else json.loads(summary.read_text()), folder


def records(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each request, values by name, and its error's code."""
    found = []
    for line in (folder / "profile_export.jsonl").read_text().splitlines():
        record = json.loads(line)
        one = {name: metric["value"] for name, metric in record["metrics"].items()}
        found.append(one | {"error": (record.get("error") or {}).get("code")})
    return found


def counts(endpoint: str, *flags: str, answer: int = ANSWER) -> dict[str, Any]:
    """A run whose usage is what aiperf's tokenizer counts, request by request."""
    flags = ("--request-count", str(REQUESTS), *flags)
    summary, folder = profile(endpoint, *flags, answer=answer)
    assert summary["request_count"]["avg"] == REQUESTS, summary["error_summary"]
    assert not summary["error_summary"], summary["error_summary"]
    assert summary["usage_discrepancy_count"]["avg"] == 0, summary["usage_prompt_tokens_diff_pct"]
    found = records(folder)
    assert len(found) == REQUESTS
    for one in found:
        assert one["usage_prompt_tokens"] == one["input_sequence_length"], one
        assert one["usage_completion_tokens"] == one["output_sequence_length"], one
        assert 0 < one["usage_completion_tokens"] <= answer, one
        assert one["http_req_chunks_received"] > 2, "the answer came in one piece"
        assert one["time_to_first_token"] < one["request_latency"], one
    return {
        "prompt_tokens": sorted(one["usage_prompt_tokens"] for one in found),
        "completion_tokens": sorted(one["usage_completion_tokens"] for one in found),
    }


def check_chat() -> dict[str, Any]:
    """Streamed chat: aiperf's own count through the chat template is the server's usage."""
    return counts("chat", "--apply-chat-template", *GREEDY)


def check_completions() -> dict[str, Any]:
    """Streamed completions: the same, without a template."""
    return counts("completions", *GREEDY)


def check_responses() -> dict[str, Any]:
    """The same over `/v1/responses`, where a schema has the answer end."""
    more = json.dumps({"temperature": 0, "text": {"format": FORM}})
    flags = ["--apply-chat-template", "--extra-inputs", more]
    return counts("responses", *flags, answer=100)


def check_messages() -> dict[str, Any]:
    """The same over Anthropic's `/v1/messages`."""
    return counts("messages", "--apply-chat-template", *GREEDY)


def check_conversations() -> dict[str, Any]:
    """Three turns each: a later turn's usage tells the prompt tokens that were cached."""
    turns = ["--conversation-num", "2", "--conversation-turn-mean", "3"]
    summary, folder = profile("chat", *turns, *GREEDY)
    found = records(folder)
    assert len(found) == REQUESTS and not summary["error_summary"], summary["error_summary"]
    cached = sorted(one["usage_prompt_cache_read_tokens"] for one in found)
    assert sum(count > PROMPT for count in cached) == 4, cached  # all turns but the first
    assert all(one["usage_prompt_cache_read_tokens"] < one["usage_prompt_tokens"] for one in found)
    return {"cached_tokens": cached}


def counter(name: str, label: str = "") -> float:
    """A sample of `/metrics`, read by ourselves."""
    with urllib.request.urlopen(f"{checks.URL}/metrics") as page:
        lines = page.read().decode().splitlines()
    wanted = f'metainfer_{name}{{model_name="{checks.MODEL}"{label}}} '
    (found,) = [line.removeprefix(wanted) for line in lines if line.startswith(wanted)]
    return float(found)


def check_server_metrics() -> dict[str, Any]:
    """aiperf finds and scrapes `/metrics`; what the server counted is what aiperf counted."""
    names = ("prefix_cache_query_tokens_total", "generated_tokens_total")
    before = [counter(name) for name in names]
    summary, folder = profile("chat", "--request-count", str(REQUESTS), *GREEDY)
    scraped = json.loads((folder / "server_metrics_export.json").read_text())
    assert scraped["summary"]["endpoints_successful"] == [f"{checks.URL}/metrics"]
    kinds = {name: metric["type"] for name, metric in scraped["metrics"].items()}
    assert kinds["metainfer_generated_tokens"] == "counter", kinds
    assert kinds["metainfer_requests_running"] == "gauge", kinds
    assert kinds["metainfer_time_to_first_token_seconds"] == "histogram", kinds
    grown = [counter(name) - old for name, old in zip(names, before, strict=True)]
    usage = [summary[f"total_usage_{name}_tokens"]["avg"] for name in ("prompt", "completion")]
    assert grown == usage, (grown, usage)
    return {"families": len(kinds), "prompt_and_generated_tokens": grown}


def check_cancellation() -> dict[str, Any]:
    """Requests that aiperf gives up are given up by the server, and counted so."""
    cancelled = ',outcome="cancelled"'
    before = counter("requests_total", cancelled)
    flags = ["--request-cancellation-rate", "100", "--request-cancellation-delay", "0.3"]
    flags += ["--request-count", "4", "--extra-inputs", "ignore_eos:true"]
    _, folder = profile("chat", *flags, answer=1000, fails=True)
    assert [one["error"] for one in records(folder)] == [499] * 4
    until = time.monotonic() + 30
    while counter("requests_total", cancelled) - before < 4 and time.monotonic() < until:
        time.sleep(0.1)
    assert counter("requests_total", cancelled) - before == 4
    assert counter("requests_running") == counter("requests_waiting") == 0
    return {"cancelled": 4}


def check_refusal() -> None:
    """A model that is not there is an error of every request, by its code."""
    _, folder = profile("chat", "--request-count", "2", model="other", fails=True)
    assert [one["error"] for one in records(folder)] == [404] * 2


if __name__ == "__main__":
    checks.run(dict(globals()))
