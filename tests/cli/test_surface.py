"""The public surface is frozen: adding a flag is an edit here, in the same commit."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections.abc import Callable

import pytest
from command_line import cli, environ

from metainfer.cli.declared import Verbs
from metainfer.cli.main import build

ENGINE = {
    "--context", "--concurrency", "--kv-memory", "--memory-share", "--chunk-tokens",
    "--mixed-prefill-tokens",
    "--page-tokens", "--threads",
    "--goal", "--dtype", "--platform", "--op", "--layout", "--parallel", "--allow-fallback",
    "--collectives", "--one-card", "--rank-of",
    "--no-prefix-cache", "--no-graphs", "--no-overlap", "--halves", "--sum-pieces",
    "--gathers-beside",
    "--shared-beside", "--rounded-from", "--prefill-from", "--draft", "--grammar-backend",
    "--model-option", "--config",
}  # fmt: skip
ADAPTERS = {"--adapter"}
SAMPLING = {"--max-tokens", "--temperature", "--top-p", "--top-k", "--seed"}
FLAGS: dict[tuple[str, ...], set[str]] = {
    ("serve",): ENGINE | ADAPTERS | {
        "--host", "--port", "--uds", "--root-path", "--ssl-certfile", "--ssl-keyfile",
        "--api-key", "--api-key-file", "--admin-key", "--cors-origin",
        "--max-pending", "--max-body", "--max-headers", "--limit", "--request-timeout",
        "--body-timeout", "--priority-order", "--drain-grace", "--keep-alive",
        "--served-model-name", "--chat-template",
        "--nan-guard", "--hang-after", "--try-limit", "--max-restarts", "--metrics-compat",
        "--otlp-endpoint", "--machine", "--json",
    },
    ("generate",): ENGINE | ADAPTERS | SAMPLING | {"--prompt", "--stop", "--chat", "--json"},
    ("chat",): ENGINE | ADAPTERS | SAMPLING | {"--system", "--json"},
    ("doctor",): ENGINE | {
        "--model", "--machine", "--save-machine", "--deep", "--html", "--host-text",
        "--save-host-text", "--engine", "--engine-args", "--json",
    },
    ("plan",): ENGINE | ADAPTERS | {"--model", "--machine", "--explain", "--json"},
    ("plan", "diff"): {"--json"},
    ("simulate",): ENGINE | {
        "--model", "--machine", "--workload", "--curve", "--seed", "--acceptance", "--compare",
        "--json",
    },
    ("kernels", "list"): {"--json"},
    ("kernels", "compile"): {"--target", "--plan", "--json"},
    ("bench", "offline"): ENGINE | {
        "--prompt-tokens", "--output-tokens", "--batch", "--prefill-tokens", "--repeats",
        "--against", "--seed", "--machine", "--json",
    },
    ("bench", "serve"): ENGINE | {
        "--url", "--api-key", "--workload", "--repeats", "--warm-up", "--seed", "--json",
    },
    ("bench", "calibrate"): ENGINE | {"--repeats", "--seed", "--dry-run", "--json"},
    ("bench", "ladder"): ENGINE | {
        "--prompt-tokens", "--output-tokens", "--batch", "--prefill-tokens", "--repeats", "--seed",
        "--picture", "--json",
    },
    ("tune", "capacity"): ENGINE | {"--seconds", "--seed", "--dry-run", "--json"},
    ("tune", "kernels"): ENGINE | {"--only", "--rounds", "--seed", "--dry-run", "--json"},
    ("tune", "comm"): ENGINE | {"--seconds", "--dry-run", "--json"},
    ("verify",): ENGINE | {"--seed", "--bringup", "--report", "--time-limit", "--json"},
    ("convert",): {"--to", "--lossless", "--json"},
    ("version",): {"--json"},
    ("report",): {"--url", "--admin-key", "--json"},
    ("config", "explain"): {"--json"},
    ("config", "show"): {"--json"},
    ("completion",): {"--json"},
}  # fmt: skip


DECLARED = Verbs(build())
SHORT = {"--model": "-m", "--prompt": "-p"}


def test_verbs_are_frozen() -> None:
    assert set(DECLARED) == set(FLAGS)


@pytest.mark.parametrize("verb", FLAGS, ids=" ".join)
def test_flags_are_frozen(verb: tuple[str, ...]) -> None:
    names = {name for name in DECLARED[verb].by_name if name.startswith("--")}
    assert names == FLAGS[verb]
    others = {name for name in DECLARED[verb].by_name if not name.startswith("--")}
    assert others <= {SHORT[flag] for flag in FLAGS[verb] & SHORT.keys()}


def test_help_shows_what_is_declared() -> None:
    done = cli("serve", "--help")
    assert done.returncode == 0
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", done.stdout))
    assert FLAGS[("serve",)] <= shown
    top = cli("--help").stdout
    assert {verb[0] for verb in FLAGS} <= set(re.findall(r"^│ ([a-z]+) ", top, re.MULTILINE))


def processor_s(run: Callable[[], int]) -> float:
    """Processor time of the one process that `run` starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run() == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_quick_and_light() -> None:
    """Half a second of processor time on a machine where the yardstick takes 0.09 s."""
    yardstick = [sys.executable, "-c", "import argparse, asyncio, dataclasses, inspect, json"]
    shares = []
    for _ in range(3):
        plain = processor_s(lambda: subprocess.run(yardstick, check=True).returncode)
        shares.append(processor_s(lambda: cli("--help").returncode) / plain)
    assert min(shares) < 0.5 / 0.09, shares
    code = "import sys, metainfer.cli.main as m; m.build(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ(), check=True
    )
    heavy = {"torch", "numpy", "fastapi", "starlette", "pydantic", "uvicorn", "zmq", "tokenizers",
             "jinja2", "transformers", "triton", "prometheus_client"}  # fmt: skip
    assert heavy.isdisjoint(done.stdout.split())


def test_the_server_process_has_no_torch() -> None:
    code = (
        "import sys, metainfer.server.app, metainfer.server.run, metainfer.engine.client\n"
        "from metainfer.engine.model_text import byte_text\n"
        "byte_text(300)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_version() -> None:
    import metainfer

    assert cli("--version").stdout.strip() == metainfer.__version__
    assert metainfer.__version__ in cli("version").stdout
