"""Prometheus itself over the metrics, the alert rules and the dashboard's queries.

``python tests/conformance/heavy/prometheus.py`` needs Debian's package `prometheus` (promtool is in
it) and PyPI, for vllm-doctor, which reads the same through vLLM's names. A real server is scraped
with its API key. Writes `../results/prometheus.json`.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MONITORING = ROOT / "docs" / "monitoring"
RULES = MONITORING / "alerts.yml"
RESULT = HERE.parent / "results" / "prometheus.json"
KEY = "k"
#: What vllm-doctor finds no sample of: outcomes that did not happen, gauges that vLLM gave up.
UNREAD = {
    "request_error_total",
    "request_abort_total",
    "prompt_tokens_per_second",
    "generation_tokens_per_second",
}
#: What it may say of a healthy server: this machine's speed is not under test.
SPEED = {"tpot_bottleneck", "ttft_bottleneck", "queue_latency", "low_throughput"}
L = '{model_name="m",instance="i"'


def counter(name: str, step: str, more: str = "") -> tuple[str, str]:
    return f"metainfer_{name}{L}{more}}}", f"0+{step}x60"


def gauge(name: str, value: str, more: str = "") -> tuple[str, str]:
    return f"metainfer_{name}{L}{more}}}", f"{value}x60"


def failing(bad: str) -> list[tuple[str, str]]:
    return [
        counter("requests_total", bad, ',outcome="engine_error"'),
        counter("requests_total", "10", ',outcome="finished"'),
        counter("requests_total", "90", ',outcome="cancelled"'),
    ]


def first_tokens(late: str) -> list[tuple[str, str]]:
    name = "time_to_first_token_seconds_bucket"
    return [
        counter(name, "90", ',le="10.0"'),
        counter(name, "100", f',le="{late}"'),
        counter(name, "100", ',le="+Inf"'),
    ]


#: alert -> (series of one minute's step with which it fires within the hour, those with which not).
#: A rule without a firing or a silent case fails the run.
CASES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "MetaInferGone": ([gauge("other", "1")], [gauge("ready", "0")]),
    "MetaInferNotReady": ([gauge("ready", "0")], [gauge("ready", "1")]),
    "MetaInferStalled": (
        [gauge("requests_running", "3"), gauge("engine_steps_total", "70")],
        [gauge("requests_running", "3"), counter("engine_steps_total", "1")],
    ),
    "MetaInferFailing": (failing("6"), failing("5")),
    "MetaInferNumbersBroken": (
        [counter("non_finite_requests_total", "1")],
        [gauge("non_finite_requests_total", "9")],
    ),
    "MetaInferRestarted": (
        [counter("engine_restarts_total", "1")],
        [gauge("engine_restarts_total", "9")],
    ),
    "MetaInferMemoryShort": (
        [counter("abandoned_steps_total", "1")],
        [gauge("abandoned_steps_total", "9")],
    ),
    "MetaInferRefusing": (
        [counter("admission_rejections_total", "1")],
        [gauge("admission_rejections_total", "7")],
    ),
    "MetaInferQueueing": (
        [gauge("requests_waiting", "1")],
        [(f"metainfer_requests_waiting{L}}}", "8 8 8 8 0 " * 12)],
    ),
    "MetaInferFirstTokenLate": (first_tokens("30.0"), [counter(
        "time_to_first_token_seconds_bucket", "100", f',le="{le}"') for le in ("10.0", "+Inf")]),
    "MetaInferAnswersPause": (
        [gauge("longest_decode_gap_seconds", "5.5")],
        [gauge("longest_decode_gap_seconds", "5")],
    ),
    "MetaInferCacheShort": (
        [gauge("kv_cache_usage_ratio", "0.97"), counter("preemptions_total", "2")],
        [gauge("kv_cache_usage_ratio", "0.97"), counter("preemptions_total", "0.5")],
    ),
    "MetaInferDraftsInVain": ([gauge("draft_alarm", "1")], [gauge("draft_alarm", "0")]),
    "MetaInferCacheInVain": (
        [gauge("prefix_cache_alarm", "1")],
        [gauge("prefix_cache_alarm", "0")],
    ),
    "MetaInferFallback": (
        [gauge("ops", "2", ',quality="reference"')],
        [gauge("ops", "0", ',quality="reference"'), gauge("ops", "9", ',quality="native"')],
    ),
    "MetaInferMemoryOverPlan": (
        [
            gauge("memory_held_bytes", "102", ',pool="kv"'),
            gauge("memory_planned_bytes", "100", ',pool="kv"'),
        ],
        [
            gauge("memory_held_bytes", "101", ',pool="kv"'),
            gauge("memory_planned_bytes", "100", ',pool="kv"'),
            gauge("memory_planned_bytes", "1", ',pool="transient"'),
        ],
    ),
    "MetaInferLinkNarrow": (
        [
            gauge("link_lanes", "8", ',source="host",target="0"'),
            gauge("link_max_lanes", "16", ',source="host",target="0"'),
        ],
        [
            gauge("link_lanes", "16", ',source="host",target="0"'),
            gauge("link_max_lanes", "16", ',source="host",target="0"'),
        ],
    ),
    "MetaInferTracesLost": (
        [counter("trace_spans_total", "1", ',result="lost"')],
        [counter("trace_spans_total", "1", ',result="exported"')],
    ),
}  # fmt: skip


def rule_tests() -> dict[str, Any]:
    """A file for ``promtool test rules``: each rule fires in its first world, not in its second."""
    tests = []
    for alert, worlds in CASES.items():
        for fires, series in zip((True, False), worlds, strict=True):
            test: dict[str, Any] = {
                "interval": "1m",
                "input_series": [{"series": name, "values": text} for name, text in series],
                "name": f"{alert}, {'fires' if fires else 'silent'}",
            }
            if fires:  # that it fires at all is counted by a query, whatever its labels
                query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
                sample = {"labels": "{}", "value": 1}
                test["promql_expr_test"] = [
                    {"expr": query, "eval_time": "50m", "exp_samples": [sample]}
                ]
            else:
                silent = {"eval_time": "50m", "alertname": alert, "exp_alerts": []}
                test["alert_rule_test"] = [silent]
            tests.append(test)
    return {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}


versions: dict[str, str] = {}


def promtool(*command: str, text: str | None = None) -> tuple[bool, str]:
    done = subprocess.run(["promtool", *command], input=text, capture_output=True, text=True)
    return done.returncode == 0, (done.stdout + done.stderr).strip()[-2000:]


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """The URL of a real server; stopped at the end."""
    command = [sys.executable, "-m", "metainfer", "serve", "random:tiny-qwen3", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--context", "256", "--api-key", KEY, "--json", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["url"])
    finally:
        process.terminate()
        process.wait(30)


def get(url: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def ask(url: str, count: int) -> None:
    body = {"model": "random:tiny-qwen3", "prompt": [5] * 40, "max_tokens": 16}
    for _ in range(count):
        get(f"{url}/v1/completions", body)


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[str]:
    """The URL of a Prometheus that scrapes `target` every second."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "metainfer",
                "authorization": {"credentials": KEY},
                "static_configs": [{"targets": [target.removeprefix("http://")]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    good, told = promtool("check", "config", str(folder / "prometheus.yml"))
    assert good, told
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            "prometheus", f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def api(base: str, path: str) -> Any:
    with urllib.request.urlopen(f"{base}/api/v1/{path}", timeout=30) as answer:
        return json.loads(answer.read())["data"]


def expressions() -> list[str]:
    """The dashboard's queries with its variables filled in."""
    document = json.loads((MONITORING / "grafana.json").read_text())
    return [
        target["expr"]
        .replace("$model", ".*")
        .replace("$instance", ".*")
        .replace("$__rate_interval", "10s")
        for panel in document["panels"]
        for target in panel.get("targets", ())
    ]


def scraped(base: str, url: str) -> Iterator[tuple[str, bool, str]]:
    """Checks against the Prometheus at `base`, which scrapes the server at `url`."""

    def value(expression: str) -> Any:
        return api(base, "query?query=" + urllib.parse.quote(expression))["result"]

    until = time.monotonic() + 60
    while time.monotonic() < until:
        ask(url, 2)
        try:
            if len(value("metainfer_engine_steps_total offset 8s")):
                break
        except OSError:
            pass
        time.sleep(1)
    (target,) = api(base, "targets")["activeTargets"]
    yield "the target is up", target["health"] == "up", target["lastError"]
    page = get(f"{url}/metrics")
    names = set(re.findall(r"^(metainfer_\w+?)(?:\{| )", page, re.M))
    stored = {row for row in api(base, "label/__name__/values") if row.startswith("metainfer_")}
    yield f"all {len(names)} names of the page are stored", names == stored, str(names ^ stored)
    told = []
    empty = []
    for expression in expressions():
        try:
            result = value(expression)
        except OSError as error:
            told.append(f"{expression}: {error}")
            continue
        if not result and not re.search("link|trace|restart_seconds", expression):
            empty.append(expression)
    yield f"all {len(expressions())} queries of the dashboard run", not told, "; ".join(told)
    yield "and have data, links, traces and restarts apart", not empty, "; ".join(empty)
    rules = [rule for group in api(base, "rules")["groups"] for rule in group["rules"]]
    bad = [rule["name"] for rule in rules if rule["health"] != "ok"]
    yield f"{len(rules)} alert rules evaluate", len(rules) == len(CASES) and not bad, str(bad)
    firing = [rule["name"] for rule in rules if rule["state"] == "firing"]
    yield "no alert fires on a healthy server", not firing, str(firing)


def vllm_doctor(base: str, url: str, folder: Path) -> Iterator[tuple[str, bool, str]]:
    """A tool that knows vLLM's names only, over the same Prometheus."""
    python = folder / "vllm-doctor" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", "vllm-doctor"], check=True)
    shown = subprocess.run([str(python), "-m", "pip", "show", "vllm-doctor"], capture_output=True)
    versions["vllm-doctor"] = shown.stdout.decode().split("Version: ")[1].split()[0]
    ask(url, 20)
    command = [str(python.with_name("vllm-doctor")), "diagnose", base, "--since", "1m"]
    done = subprocess.run(
        [*command, "-v", "-o", "json"], capture_output=True, text=True, cwd=folder
    )
    try:
        told = json.loads(done.stdout)
    except json.JSONDecodeError:
        yield "vllm-doctor reads the server", False, done.stdout + done.stderr
        return
    found = [check["id"] for check in told["checks"] if check["finding"]]
    yield "vllm-doctor finds nothing but speed", not set(found) - SPEED, str(found)
    unread = [name for name, row in told["metrics"].items() if row["value"] is None]
    yield "vllm-doctor reads what it looks for", not set(unread) - UNREAD, str(unread)


def checks(folder: Path) -> Iterator[tuple[str, bool, str]]:
    yield "promtool check rules", *promtool("check", "rules", str(RULES))
    (folder / "test.yml").write_text(json.dumps(rule_tests()))
    yield (
        f"promtool test rules: {len(CASES)} fire and stay silent",
        *promtool("test", "rules", str(folder / "test.yml")),
    )
    with served("--metrics-compat", "vllm") as url:
        ask(url, 5)
        lines = get(f"{url}/metrics").splitlines(keepends=True)
        page = "".join(line for line in lines if "vllm:" not in line)  # promtool wants no colons
        good, told = promtool("check", "metrics", text=page)
        yield "promtool check metrics: not a word", good and not told, told
        with prometheus(url, folder) as base:
            yield from scraped(base, url)
            yield from vllm_doctor(base, url, folder)


def main() -> int:
    if shutil.which("prometheus") is None:
        print("prometheus is missing: apt install prometheus", file=sys.stderr)
        return 2
    told = subprocess.run(["prometheus", "--version"], capture_output=True, text=True)
    versions["prometheus"] = (told.stdout + told.stderr).split()[2]
    with tempfile.TemporaryDirectory() as name:
        rows = [
            {"name": check, "passed": good, **({} if good else {"seen": seen})}
            for check, good, seen in checks(Path(name))
        ]
    git = ["git", "rev-parse", "--short", "HEAD"]
    failed = sum(not row["passed"] for row in rows)
    result = {
        "tool": "prometheus",
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "passed": len(rows) - failed,
        "failed": failed,
        "checks": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print("ok    " if row["passed"] else "FAILED", row["name"], row.get("seen", ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
