"""``vllm bench serve``: the load of vLLM's own benchmark over text completions and chat."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

#: What the command imports. vLLM itself is installed without the rest, which is for GPUs.
REQUIRES = [
    "torch>=2.13,<2.14", "transformers>=5.16.1,<5.21", "aiohttp", "blake3", "cachetools", "cbor2",
    "cloudpickle", "einops", "fastapi", "llguidance>=1.7,<1.8", "msgspec", "numpy", "openai",
    "openai-harmony", "orjson", "partial-json-parser", "pillow", "prometheus_client", "psutil",
    "py-cpuinfo", "pybase64", "pydantic", "pyyaml", "pyzmq", "regex", "requests", "setproctitle",
    "tqdm", "uvicorn", "uvloop", "watchfiles", "xgrammar==0.2.8",
]  # fmt: skip
BARE = ["vllm==0.33.0"]
REPORTS = ["vllm", "torch", "transformers"]
SERVER = ["--context", "1024", "--concurrency", "4"]

import checks  # noqa: E402

REQUESTS, PROMPT, ANSWER = 8, 64, 16


def counted() -> dict[str, int]:
    """The server's own counters."""
    with urllib.request.urlopen(f"{checks.URL}/metrics", timeout=30) as answer:
        rows = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines()]
    names = {"prompt": "prompt_tokens_total", "generated": "generated_tokens_total"}
    return {
        short: sum(int(float(row[1])) for row in rows if row[0].startswith(f"metainfer_{name}{{"))
        for short, name in names.items()
    }


@functools.cache
def bench(backend: str, endpoint: str, *flags: str) -> dict[str, Any]:
    """The result file of one run, and under `server` what the server counted meanwhile."""
    folder = Path(tempfile.mkdtemp(dir=".")).resolve()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += ["--backend", backend, "--base-url", checks.URL, "--endpoint", endpoint]
    command += ["--model", checks.MODEL, "--tokenizer", checks.TOKENIZER]
    command += ["--dataset-name", "random", "--num-prompts", str(REQUESTS)]
    command += ["--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER)]
    command += ["--max-concurrency", "4", "--seed", "7", "--temperature", "0", "--disable-tqdm"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(folder)]
    command += ["--result-filename", "result.json", *flags]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "HOME": str(folder)}
    before = counted()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    after = counted()
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found | {"server": {name: after[name] - before[name] for name in after}}


def completed(found: dict[str, Any]) -> dict[str, Any]:
    """All was answered, in several pieces, and both sides counted the same answers."""
    assert (found["completed"], found["failed"]) == (REQUESTS, 0), found["errors"]
    assert not any(found["errors"]), found["errors"]
    assert found["total_output_tokens"] == found["server"]["generated"], found["server"]
    assert found["total_output_tokens"] == sum(found["output_lens"])
    assert 0 < min(found["output_lens"]) <= max(found["output_lens"]) <= ANSWER
    assert all(first > 0 for first in found["ttfts"]), found["ttfts"]
    assert all(len(gaps) > 1 for gaps in found["itls"]), "an answer came in one piece"
    return {
        "completed": found["completed"],
        "output tokens": found["total_output_tokens"],
        "input tokens": found["total_input_tokens"],
        "server": found["server"],
    }


def check_completions() -> dict[str, Any]:
    """Text completions past every end: all completed, no failure, equal counts of every token."""
    found = bench("openai", "/v1/completions", "--ignore-eos")
    assert found["total_output_tokens"] == REQUESTS * ANSWER
    assert found["total_input_tokens"] == REQUESTS * PROMPT
    assert found["server"]["prompt"] == found["total_input_tokens"], found["server"]
    return completed(found)


def check_chat() -> dict[str, Any]:
    """Chat: all completed, no failure, equal counts of generated tokens."""
    return completed(bench("openai-chat", "/v1/chat/completions"))


def check_failures_are_seen() -> list[str]:
    """Requests that the server refuses are counted as failed, with its status."""
    found = bench("openai", "/v1/completions", "--extra-body", '{"temperature": -1}')
    assert (found["completed"], found["failed"]) == (0, REQUESTS), found["errors"]
    assert set(found["errors"]) == {"Bad Request"}, found["errors"]
    return found["errors"][:1]


if __name__ == "__main__":
    checks.run(dict(globals()))
