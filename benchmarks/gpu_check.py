"""One GPU, verified then measured: kernels by their cases, logits, speed beside the limits.

    python benchmarks/gpu_check.py --smollm2 FILE.gguf --out FOLDER

Writes ``gpu_check.json``. Limits: decode reads every weight and the cached keys and values once per
step, at the copy rate measured here; prefill does 2 FLOP per weight and token (and attention's), at
the matrix rate measured here. Exit status 1 when a check fails; speed is reported either way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from metainfer.bench.conditions import conditions
from metainfer.bench.reference import transformers_model
from metainfer.core.intent import Intent
from metainfer.core.request import Request, SamplingParams
from metainfer.engine.engine import Engine
from metainfer.engine.machine import open_machine
from metainfer.ops.qualify import qualify
from metainfer.planner.opening import open_model

BAR = 1.25
"""Most that our error may exceed the reference recipe's own, in the same type (law 2)."""

SHAPE = "random:qwen3-8b"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", required=True, help="the GGUF file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--skip-speed", action="store_true")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"ceilings": ceilings(), "kernels": kernels()}
    report["logits"] = logits(arguments.smollm2)
    failed = [row for row in report["kernels"] if row["reasons"]]
    if not arguments.skip_speed:
        report["speed"], report["conditions"] = speed(report["ceilings"])
    report["ok"] = not failed and bool(report["logits"]["ok"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu_check.json").write_text(json.dumps(report, indent=1, default=str))
    print(f"{'OK' if report['ok'] else 'FAILED'}: {len(failed)} kernels failed their cases")
    return 0 if report["ok"] else 1


def timed(call: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of one call on the device."""
    for _ in range(3):
        call()
    seconds = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def ceilings() -> dict[str, float]:
    """Copy rate (bytes read and written) and bf16 matrix rate of this card, on random data."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / timed(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * 8192**3 / timed(lambda: a @ b)
    print(f"ceilings: copy {copy / 1e12:.2f} TB/s, bf16 {flops / 1e12:.0f} TFLOP/s")
    return {"copy_bytes_s": copy, "bf16_flops": flops}


def kernels() -> list[dict[str, object]]:
    """Every implementation that may run on this device, through its op's cases."""
    machine = open_machine("cuda")
    rows = []
    for impl in machine.registry.impls():
        for dtype in sorted(impl.dtypes & {"bfloat16", "float16", "float32"}):
            verdict = qualify(impl, dtype, "cuda", machine.facts, machine.registry)
            reasons = [reason.message for reason in verdict.reasons]
            if any(reason.code == "cases" for reason in verdict.reasons):
                continue  # it does not claim this device or type
            rows.append({"impl": impl.id, "dtype": dtype, "reasons": reasons[:5]})
            print(f"{impl.id:28s} {dtype:9s} {'passed' if not reasons else reasons[:2]}")
    return rows


def logits(smollm2: str) -> dict[str, object]:
    """SmolLM2 in bf16 here against float32 on the CPU; transformers in bf16 sets the bar."""
    opened = open_model(smollm2)
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(20, 49000, (600,), generator=generator).tolist()
    exact = prompt_logprobs(Intent(model=smollm2, platform="cpu", context=1024), prompt)
    ours = prompt_logprobs(Intent(model=smollm2, platform="cuda", context=1024), prompt)
    theirs_model = transformers_model(opened, torch.float32).to("cuda", torch.bfloat16)
    ids = torch.tensor([prompt], device="cuda")
    with torch.inference_mode():
        scores = theirs_model(ids).logits[0].float().log_softmax(-1)
    theirs = scores[:-1].gather(1, ids[0, 1:, None]).squeeze(1).cpu()
    errors = {
        name: (float((side - exact).abs().mean()), float((side - exact).abs().max()))
        for name, side in (("metainfer", ours), ("transformers", theirs))
    }
    ok = errors["metainfer"][0] <= BAR * errors["transformers"][0]
    print(f"logits, bf16 against float32 (mean, worst): {errors}; bar {BAR}x of the mean: {ok}")
    return {"errors": errors, "bar": BAR, "ok": ok, "tokens": len(prompt)}


def prompt_logprobs(intent: Intent, prompt: list[int]) -> torch.Tensor:
    engine = Engine(intent)
    engine.start()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    engine.submit(Request("p", tuple(prompt), params))
    found: list[float] = []
    while engine.has_work:
        outputs, _ = engine.step()
        for output in outputs:
            found += [item.logprob for item in output.prompt_logprobs]
    engine.close()
    return torch.tensor(found)


def speed(ceiling: dict[str, float]) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Decode and prefill of an 8B dense shape through the whole engine, host work included."""
    begin = time.perf_counter()
    intent = Intent(
        model=SHAPE,
        platform="cuda",
        context=16384,
        concurrency=64,
        prefix_cache=False,
        chunk_tokens=8192,
    )
    engine = Engine(intent, lambda p: print(p) if p.seconds else None)
    engine.start()
    print(f"start to ready: {time.perf_counter() - begin:.1f} s")
    assert engine.resolved is not None
    arch: Any = engine.resolved.arch
    matrices = sum(w.elements for w in arch.packed_weights() if w.site != "embed")
    per_token = 2 * arch.layers * arch.kv_heads * arch.head_dim * 2
    rows: list[dict[str, object]] = []
    for batch, context in ((1, 1024), (8, 1024), (32, 1024), (64, 1024), (1, 8192)):
        seconds = decode_seconds(engine, batch, context)
        limit = (2 * matrices + batch * context * per_token) / ceiling["copy_bytes_s"]
        rows.append(row(f"decode, batch {batch}, context {context}", seconds, limit))
    for tokens in (2048, 8192):
        seconds = prefill_seconds(engine, tokens)
        attention = 2 * tokens * tokens * arch.layers * arch.heads * arch.head_dim
        head = arch.vocab_size * arch.hidden
        limit = (2 * tokens * (matrices - head) + attention) / ceiling["bf16_flops"]
        rows.append(row(f"prefill, {tokens} tokens", seconds, limit))
    described = conditions(engine.resolved.plan)
    described["command"] = "python benchmarks/gpu_check.py --smollm2 FILE.gguf --out FOLDER"
    return rows, described


def row(name: str, seconds: list[float], limit: float) -> dict[str, object]:
    median = statistics.median(seconds)
    mad = statistics.median(abs(s - median) for s in seconds)
    share = limit / median
    print(f"{name:32s} {median * 1e3:8.2f} ms (mad {mad * 1e3:.2f}), limit {limit * 1e3:.2f} ms, "
          f"{share:.0%} of it")  # fmt: skip
    return {
        "row": name,
        "median_s": median,
        "mad_s": mad,
        "n": len(seconds),
        "limit_s": limit,
        "share_of_limit": share,
    }


_count = 0


def submit(engine: Engine, batch: int, tokens: int, answer: int) -> None:
    """Fresh random prompts, unique from the first token."""
    global _count
    generator = torch.Generator().manual_seed(_count)
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    assert engine.resolved is not None
    vocab = engine.resolved.arch.vocab_size
    for _ in range(batch):
        _count += 1
        prompt = torch.randint(20, vocab, (tokens,), generator=generator).tolist()
        engine.submit(Request(f"s{_count}", tuple(prompt), params))


def decode_seconds(engine: Engine, batch: int, context: int, steps: int = 40) -> list[float]:
    """Wall seconds of each pure decode step, from schedule to committed tokens."""
    assert engine.resolved is not None
    # While some decode, prompts enter at `mixed` tokens a step: the first must still be running
    # when the last has entered.
    mixed = engine.resolved.plan.limits.mixed_prefill_tokens
    submit(engine, batch, context - 20, steps + 8 + batch * context // mixed)
    seconds = []
    while engine.has_work:
        begin = time.perf_counter()
        outputs, stats = engine.step()
        took = time.perf_counter() - begin
        if sum(len(output.tokens) for output in outputs) == batch and stats.running == batch:
            seconds.append(took)
    return seconds[3:]


def prefill_seconds(engine: Engine, tokens: int, repeats: int = 6) -> list[float]:
    """Wall seconds from submission to the first token, one request at a time."""
    seconds = []
    for _ in range(repeats):
        submit(engine, 1, tokens, 1)
        begin = time.perf_counter()
        while engine.has_work:
            engine.step()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


if __name__ == "__main__":
    sys.exit(main())
