"""`bench serve`: a workload sent to a server over HTTP, with what would flatter it refused (B-36).

Every prompt is drawn anew for every repeat, so nothing of an earlier one is in the cache; tokens
are counted by the server's usage, not by chunks; steps of the engine stand beside tokens. A row is
marked contaminated, and is not summed up, when prompts that must be cold were found in the cache or
when the server computed tokens that were not ours.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metainfer.bench.client import Server
from metainfer.bench.conditions import surroundings
from metainfer.core.errors import RefusedError, UserError
from metainfer.simulator.outcome import COMPARED, Served, figure, summary
from metainfer.simulator.workload import Release, Workload, draw

COLD = ("closed", "poisson")
"""Kinds whose prompts share nothing: a cached token there is another run's."""

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """`warm_up`: requests sent before anything is timed. Repeat i draws with seed + i."""

    workload: str
    seed: int = 0
    repeats: int = 3
    warm_up: int = 2


@dataclass(frozen=True, slots=True)
class Counters:
    """The server's own counts, of ``/metrics``."""

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values.get(f"metainfer_{name}_total", self.values.get(f"metainfer_{name}", 0.0))

    def since(self, before: Counters, name: str) -> float:
        return self[name] - before[name]


_SAMPLE = re.compile(r'^(metainfer_\w+)(?:\{model_name="[^"]*"\})? (\S+)$', re.MULTILINE)


async def counters(server: Server) -> Counters:
    """Samples of the metrics page that have no label but the model's name.

    Raises:
        UserError: it has none of ours.
    """
    page = await server.get("/metrics")
    values = {name: float(value) for name, value in _SAMPLE.findall(page)}
    if "metainfer_requests_running" not in values:
        raise UserError(
            "the server's /metrics is not this project's.",
            "Measure another engine with its own tools: what it cached would not be known.",
            code="bad_answer",
        )
    return Counters(values)


async def measure(server: Server, options: ServeOptions, log: Log) -> dict[str, Any]:
    """Serve the workload `repeats` times: ``{"workload", "runs", "measured", "spread", ...}``.

    Raises:
        RefusedError: other requests run there, or every repeat was contaminated.
        UserError: the server does not answer as it should.
    """
    plan = json.loads(await server.get("/plan"))
    models = json.loads(await server.get("/v1/models"))
    model, vocab = models["data"][0]["id"], int(plan["plan"]["model"]["vocab_size"])
    first = draw(options.workload, vocab, options.seed)
    _check(first, plan)
    await _alone(server)
    for number in range(options.warm_up):
        log(f"warm-up {number + 1} of {options.warm_up}")
        await send(server, model, draw(_SHORT, vocab, 10_000 + options.seed + number))
    runs = []
    for repeat in range(options.repeats):
        seed = options.seed + repeat
        runs.append(await one_run(server, model, draw(options.workload, vocab, seed), log))
    clean = [run for run in runs if not run["contaminated"]]
    if not clean:
        raise RefusedError(
            f"every repeat was contaminated: {runs[0]['contaminated'][0]}",
            "Measure on a server that serves nobody else.",
            code="contaminated",
        )
    return {
        "workload": options.workload,
        "seed": options.seed,
        "repeats": options.repeats,
        "model": plan["plan"]["model"]["reference"],
        "runs": runs,
        **medians(clean),
        "conditions": {
            **surroundings(),
            "machine": plan["plan"]["machine"],
            "device": plan["plan"]["device"],
            "threads": plan["plan"]["threads"],
            "plan": plan["plan"]["fingerprint"],
            "limits": plan["plan"]["limits"],
            "draft": plan["plan"]["draft"],
            "prefix_cache": plan["plan"]["prefix_cache"],
            "ops": {site: op["impl"] for site, op in plan["plan"]["ops"].items()},
            "text_class": first.text_class,
            "warm_up": options.warm_up,
            "transport": "HTTP on one connection a request, streamed, same host",
        },
    }


_SHORT = "closed:concurrency=1,requests=1,prompt=32,output=8"


def _check(workload: Workload, plan: Mapping[str, Any]) -> None:
    if any(job.extends for job in workload.jobs):
        raise RefusedError(
            "a session's next prompt holds the ids of its last answer, which HTTP does not return.",
            "Simulate it, or use closed, poisson, shared or file.",
            code="not_over_http",
        )
    limit = plan["plan"]["limits"]["max_context"]
    if workload.longest > limit:
        raise RefusedError(
            f"the longest request has {workload.longest} tokens, the server's context is {limit}.",
            "Shorten the workload or raise --context.",
        )


async def _alone(server: Server) -> None:
    now = await counters(server)
    busy = now["requests_running"] + now["requests_waiting"]
    if busy:
        raise RefusedError(
            f"{busy:.0f} other requests are running on that server.",
            "Measure when it serves nobody else.",
            code="server_busy",
        )


async def one_run(server: Server, model: str, workload: Workload, log: Log) -> dict[str, Any]:
    """One repeat: summary, the engine's counts beside it, and what was wrong with it."""
    before = await counters(server)
    served = await send(server, model, workload)
    after = await counters(server)
    told = summary(served)
    steps = after.since(before, "engine_steps")
    drafted = after.since(before, "drafted_tokens")
    generated = after.since(before, "generated_tokens")
    span = told["duration_s"]
    row: dict[str, Any] = {
        "seed": workload.seed,
        **told,
        "steps": steps,
        "forwards_s": steps / span if isinstance(span, float) and span else None,
        "tokens_per_forward": generated / steps if steps else None,
        "drafted_tokens": drafted,
        "acceptance": after.since(before, "accepted_draft_tokens") / drafted if drafted else None,
        "preemptions": after.since(before, "preemptions"),
        "longest_decode_gap_s": after["longest_decode_gap_seconds"],
        "errors": sorted({each.error for each in served if each.error}),
    }
    row["contaminated"] = contaminated(workload, served, generated)
    rate = told["output_tok_s"]
    log(f"seed {workload.seed}: {rate} tokens/s, {'; '.join(row['contaminated']) or 'clean'}")
    return row


def contaminated(workload: Workload, served: Sequence[Served], generated: float) -> list[str]:
    """Everything for which a row must not be compared.

    `generated`: tokens by the server's count.
    """
    found = []
    ours = sum(each.output for each in served)
    if generated > ours:
        found.append(f"the server generated {generated:.0f} tokens, {ours} of them ours")
    cached = sum(each.cached or 0 for each in served)
    if workload.spec.partition(":")[0] in COLD and cached:
        found.append(f"{cached} prompt tokens of cold requests were found in the cache")
    if any(each.cached is None for each in served if not each.error):
        found.append("the server does not say how many prompt tokens were cached")
    failed = [each for each in served if each.error]
    if failed:
        found.append(f"{len(failed)} requests failed: {failed[0].error}")
    short = [
        each
        for each, job in zip(served, workload.jobs, strict=False)
        if not each.error and each.output != job.output
    ]
    if short:
        found.append(f"{len(short)} answers are not as long as asked for")
    return found


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``measured``: each compared figure's median over clean repeats; ``spread``: half its range,
    over the median."""
    measured: dict[str, Any] = {}
    spread: dict[str, float] = {}
    for key in COMPARED:
        values = [value for run in runs if (value := figure(run, key)) is not None]
        if not values:
            continue
        median = statistics.median(values)
        name, _, part = key.partition(".")
        if part:
            measured.setdefault(name, {})[part] = median
        else:
            measured[name] = median
        spread[key] = (max(values) - min(values)) / 2 / median if median else 0.0
    return {"measured": measured, "spread": spread, "n": len(runs)}


async def send(server: Server, model: str, workload: Workload) -> list[Served]:
    """Send every job when it arrives; in the order of the jobs."""
    release, served = Release(workload), {}
    begin = time.perf_counter()
    running: dict[asyncio.Task[None], int] = {}
    while True:
        now = time.perf_counter() - begin
        for index, at, prompt in release.ready(now):
            each = served[index] = Served(at, len(prompt))
            job = _request(server, model, prompt, workload.jobs[index].output, each, begin)
            running[asyncio.create_task(job)] = index
        upcoming = release.next_at()
        if not running and upcoming is None:
            break
        wait = None if upcoming is None else max(upcoming - (time.perf_counter() - begin), 0)
        if not running:
            await asyncio.sleep(wait or 0)
            continue
        done, _ = await asyncio.wait(running, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
            release.ended(running.pop(task), (), time.perf_counter() - begin)
    return [served[index] for index in sorted(served)]


async def _request(
    server: Server, model: str, prompt: Sequence[int], output: int, served: Served, begin: float
) -> None:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    known = 0
    try:
        async for event in server.events("/v1/completions", body):
            now = time.perf_counter() - begin
            usage = event.get("usage") or {}
            count = int(usage.get("completion_tokens") or 0)
            if count > known:
                served.times.append(now)
                served.counts.append(count - known)
                known = count
            details = usage.get("prompt_tokens_details") or {}
            if details.get("cached_tokens") is not None:
                served.cached = int(details["cached_tokens"])
    except (UserError, OSError, ValueError) as error:
        served.error = str(error) or type(error).__name__
