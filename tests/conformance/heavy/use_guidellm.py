"""guidellm (the vLLM project's benchmark client): concurrent streams over three routes, its usage
read from every chunk, conversations, a run cut by time."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

REQUIRES = ["guidellm>=0.8.1"]
REPORTS = ["guidellm", "transformers", "torch"]
SERVER = ["--context", "2048", "--concurrency", "4"]

import checks  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

PROGRAM = Path(sys.executable).parent / "guidellm"
REQUESTS, STREAMS, PROMPT, ANSWER = 6, 2, 48, 12


def run(
    *flags: str,
    route: str = "/v1/chat/completions",
    model: str = checks.MODEL,
    answer: int = ANSWER,
    data: str = "",
) -> dict[str, Any]:
    """The one benchmark of a concurrent run."""
    out = Path(tempfile.mkdtemp(dir=".")) / "out.json"
    backend = f"kind=openai_http,target={checks.URL},model={model},request_format={route}"
    shape = f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={answer}{data}"
    command = [str(PROGRAM), "run", "--backend", backend, "--data", shape]
    command += ["--profile", f"kind=concurrent,streams={STREAMS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={checks.TOKENIZER}"]
    command += ["--output", f"kind=json,path={out}", "--disable-console"]
    flags = flags or ("--constraint", f"kind=max_requests,count={REQUESTS}")
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-1000:]
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    return benchmark


def whole(benchmark: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests of a run that had no other than good ones, `STREAMS` of them at a time."""
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["total"]) == (REQUESTS, REQUESTS), totals
    concurrency = benchmark["metrics"]["request_concurrency"]["successful"]
    assert concurrency["max"] == STREAMS, concurrency
    found = benchmark["requests"]["successful"]
    for one in found:
        assert one["output_tokens"] == ANSWER, one
        assert one["info"]["timings"]["request_iterations"] > 2, "the answer came in one piece"
    return found


def body(request: dict[str, Any]) -> dict[str, Any]:
    return json.loads(request["request_args"])["body"]


def recounted(messages: list[dict[str, Any]]) -> int:
    """Prompt tokens of a chat by transformers, content parts joined."""
    texts = [
        {**m, "content": "".join(part["text"] for part in m["content"])}
        if isinstance(m["content"], list) else m
        for m in messages
    ]  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(checks.TOKENIZER)
    return len(tokenizer.apply_chat_template(texts, add_generation_prompt=True, return_dict=False))


def check_chat() -> dict[str, Any]:
    """Concurrent chat; the usage it took over is what transformers counts with the template."""
    found = whole(run())
    prompts = [one["prompt_tokens"] for one in found]
    assert prompts == [recounted(body(one)["messages"]) for one in found], prompts
    return {"prompt_tokens": prompts}


def check_completions() -> dict[str, Any]:
    """Concurrent completions, counted without a template."""
    found = whole(run(route="/v1/completions"))
    prompts = [one["prompt_tokens"] for one in found]
    tokenizer = AutoTokenizer.from_pretrained(checks.TOKENIZER)
    assert prompts == [len(tokenizer(body(one)["prompt"]).input_ids) for one in found], prompts
    return {"prompt_tokens": prompts}


def check_responses() -> dict[str, Any]:
    """The same over `/v1/responses`."""
    found = whole(run(route="/v1/responses"))
    prompts = [one["prompt_tokens"] for one in found]
    assert prompts == [recounted(body(one)["input"]) for one in found], prompts
    return {"prompt_tokens": prompts}


def check_conversations() -> dict[str, Any]:
    """Three turns each: later turns bring their history, and most of it was cached."""
    found = whole(run(data=",turns=3"))
    turns = sorted((one["info"]["turn_index"], one["cached_tokens"]) for one in found)
    cached = [count for _, count in turns]
    assert [turn for turn, _ in turns] == [0, 0, 1, 1, 2, 2], turns
    assert min(cached[2:]) > PROMPT and min(cached[4:]) > max(cached[2:4]), turns
    return {"cached_tokens": cached}


def counter(name: str, label: str = "") -> float:
    """A sample of `/metrics`."""
    with urllib.request.urlopen(f"{checks.URL}/metrics") as page:
        lines = page.read().decode().splitlines()
    wanted = f'metainfer_{name}{{model_name="{checks.MODEL}"{label}}} '
    (found,) = [line.removeprefix(wanted) for line in lines if line.startswith(wanted)]
    return float(found)


def check_cut_by_time() -> dict[str, Any]:
    """A run's time is over: what it left behind is cancelled, and the server is idle."""
    cancelled = ',outcome="cancelled"'
    before = counter("requests_total", cancelled)
    totals = run("--constraint", "kind=max_duration,seconds=2", answer=1000)["metrics"]
    left = totals["request_totals"]["incomplete"]
    assert left == STREAMS, totals["request_totals"]
    until = time.monotonic() + 30
    while counter("requests_total", cancelled) - before < left and time.monotonic() < until:
        time.sleep(0.1)
    assert counter("requests_total", cancelled) - before == left
    assert counter("requests_running") == counter("requests_waiting") == 0
    return {"cancelled": left}


def check_refusal() -> None:
    """A model that is not there is an error of every request."""
    totals = run(model="other")["metrics"]["request_totals"]
    assert totals == {"successful": 0, "errored": REQUESTS, "incomplete": 0, "total": REQUESTS}


if __name__ == "__main__":
    checks.run(dict(globals()))
