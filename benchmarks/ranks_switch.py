"""What it costs requests in flight that prompts come between; a part of `ranks_gpu.py`.

Requests decode; while they do, prompts come one after the other. In a pair (``cp2/tp2``) a step
then computes a chunk by one layout and decodes by the other; elsewhere it computes both together.
Seconds of a switch: what such a step takes beyond a chunk alone and a decode step alone; a layout
that is no pair is measured beside it. A pair's decodes are steps like any, so their tokens are the
same; elsewhere, and with prompts under a pair's `prefill_from`, rows of both kinds share kernels,
which are chosen by their number, so tokens of random weights in FP8 may change: they are only
counted.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from gpu_check import submit

from metainfer.core.request import Request, SamplingParams
from metainfer.engine.engine import Engine

TURNS, STEPS, EVERY = 3, 64, 8


def switch(engine: Engine, batch: int, context: int, prompt: int) -> dict[str, Any]:
    """`batch` requests of `context` tokens decode `STEPS` tokens, alone and with a prompt of
    `prompt` tokens each `EVERY` steps, in a pair of as many as cross over to the layout of prompts.
    There their tokens must be the same, if those of two runs alone are."""
    assert engine.resolved is not None
    plan = engine.resolved.plan
    apart = plan.layouts[0].splits_phases
    if apart:
        prompt = max(prompt, plan.prefill_from)
    report: dict[str, Any] = {"batch": batch, "context": context, "prompt": prompt, "us": []}
    first, _ = _running(engine, batch, context, 0)  # warms up, too
    same_alone, same_between = True, True
    for _ in range(TURNS):
        alone, alone_s = _running(engine, batch, context, 0)
        between, between_s = _running(engine, batch, context, prompt)
        chunks_s = sum(_chunk(engine, prompt) for _ in range(STEPS // EVERY))
        same_alone &= alone == first
        same_between &= between == first
        report["us"].append(1e6 * (between_s - alone_s - chunks_s) / (STEPS // EVERY))
    report |= {
        "median_us": statistics.median(report["us"]),
        "decode_step_us": 1e6 * alone_s / STEPS,
        "chunk_us": 1e6 * chunks_s / (STEPS // EVERY),
        "same_tokens_twice_alone": same_alone,
        "same_tokens_between_prompts": same_between,
        "wrong": ["prompts between changed tokens"]
        if apart and same_alone and not same_between
        else [],
    }
    return report


def _running(
    engine: Engine, batch: int, context: int, prompt: int
) -> tuple[dict[str, list[int]], float]:
    """Tokens by request, and seconds from the step after the last first token to the end."""
    assert engine.resolved is not None
    vocab, mixed = engine.resolved.arch.vocab_size, engine.resolved.plan.limits.mixed_prefill_tokens
    entering = batch * -(-context // mixed) + 4  # steps in which the first decode already
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + entering, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for number in range(batch):
        told = tuple(20 + (7919 * number + 31 * at) % (vocab - 20) for at in range(context))
        tokens[name := f"flight-{number}"] = []
        engine.submit(Request(name, told, params))

    def step() -> None:
        outputs, _ = engine.step()
        for output in outputs:
            tokens.get(output.request_id, []).extend(output.tokens)

    while not all(tokens.values()):
        step()
    begin = time.perf_counter()
    for number in range(STEPS):
        if prompt and number % EVERY == EVERY // 2:
            submit(engine, 1, prompt, 1)
        step()
    seconds = time.perf_counter() - begin
    while engine.has_work:
        step()
    return tokens, seconds


def _chunk(engine: Engine, prompt: int) -> float:
    submit(engine, 1, prompt, 1)
    begin = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begin
