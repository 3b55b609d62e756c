"""DeepSeek-V4-Flash shapes at long context on one card: real prompts, then decode steps.

    python benchmarks/v4_long.py --out FOLDER [--layers 12] [--contexts 131072 524288 1048576]
        [--seconds 300] [--platform cuda] [--model random:deepseek-v4-flash]

Each context is one prompt of random tokens, prefilled in chunks (every chunk timed), then 64 steps
of one token each. Bytes, FLOPs and limits as `v4_gpu.counted` has them, the largest kernels of the
last chunk and of four decode steps beside. The memory that was reserved is told against the ledger.
Writes ``v4_long.json`` after every context; a prompt that would end after `--seconds`, by the pace
of its first chunks, is stopped and told as such. Exit status 1 when one was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_check import row
from gpu_profile import kernel_shares, show
from v4_gpu import ceilings, counted, prompt_limit

from metainfer.bench.conditions import conditions
from metainfer.bench.offline import drawn_prompts
from metainfer.core.intent import Intent
from metainfer.core.request import Request, SamplingParams
from metainfer.engine.engine import Engine

STEPS = 64


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="random:deepseek-v4-flash")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--contexts", type=int, nargs="*", default=[131_072, 524_288, 1_048_576])
    parser.add_argument("--chunk-tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=300.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    rates = ceilings() if args.platform == "cuda" else {"copy_bytes_s": 2e10, "bf16_flops": 1e12}
    engine = Engine(
        Intent(
            model=f"{args.model}?layers={args.layers}",
            platform=args.platform,
            # The longest prompt fills the model's whole context with its answer.
            context=max(args.contexts),
            concurrency=2,
            prefix_cache=False,
            chunk_tokens=args.chunk_tokens,
        )
    )
    begin = time.perf_counter()
    engine.start()
    assert engine.resolved is not None
    report: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "start_s": time.perf_counter() - begin,
        "ceilings": rates,
        "conditions": conditions(engine.resolved.plan),
        "ledger": {r.item: r.bytes for r in engine.resolved.plan.ledger},
        "contexts": [],
    }
    print(f"ready in {report['start_s']:.1f} s", flush=True)
    stopped = False
    for context in args.contexts:
        found = one(engine, context - STEPS - 1, args, rates, end)
        report["contexts"].append(found)
        stopped = stopped or "stopped" in found
        if args.platform == "cuda":
            report["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        (args.out / "v4_long.json").write_text(json.dumps(report, indent=1, default=str))
        if stopped:
            break
    return int(stopped)


def one(
    engine: Engine, tokens: int, args: argparse.Namespace, rates: dict[str, float], end: float
) -> dict[str, Any]:
    """One prompt of `tokens`, then its answer."""
    assert engine.resolved is not None
    (prompt,) = drawn_prompts(1, tokens, engine.resolved.arch.vocab_size, tokens)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    engine.submit(Request(f"long-{tokens}", tuple(prompt), params))
    limit = prompt_limit(engine, tokens, rates)
    chunks: list[float] = []
    found: dict[str, Any] = {"tokens": tokens}
    first = 0
    done: list[int] = []
    while not first:
        last = (len(chunks) + 1) * args.chunk_tokens >= tokens
        begin = time.perf_counter()
        if last and args.platform == "cuda":
            found["prefill_costs"] = kernel_shares(lambda: done.append(answered(engine)), 1)
            first = done[0]
            chunks.append(found["prefill_costs"]["wall_s"])  # without the profiler's own start
        else:
            first = answered(engine)
            chunks.append(time.perf_counter() - begin)
        left = (-(-tokens // args.chunk_tokens) - len(chunks)) * chunks[-1]
        if not first and time.monotonic() + left > end:
            engine.cancel([f"long-{tokens}"])
            while engine.has_work:
                engine.step()
            print(f"{tokens} tokens: stopped after {len(chunks)} chunks")
            return found | {"chunks_s": chunks, "stopped": "it would end after --seconds"}
    found["prefill"] = row(f"prefill, {tokens} tokens", [sum(chunks)], limit["limit_s"]) | limit
    found["chunks_s"] = chunks
    seconds: list[float] = []
    while engine.has_work:
        if len(seconds) == STEPS - 8 and args.platform == "cuda":
            found["decode_costs"] = kernel_shares(engine.step, 4)
        begin = time.perf_counter()
        if answered(engine):
            seconds.append(time.perf_counter() - begin)
    work = counted(engine, [(tokens, 1)], 1, rates)
    found["decode"] = row(f"decode at {tokens}", seconds[3:], work["limit_s"]) | work
    for name in ("prefill_costs", "decode_costs"):
        if name in found:
            show(f"{name} at {tokens}", found[name])
    return found


def answered(engine: Engine) -> int:
    """Tokens of one step."""
    outputs, _ = engine.step()
    return sum(len(output.tokens) for output in outputs)


if __name__ == "__main__":
    sys.exit(main())
