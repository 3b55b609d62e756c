"""DeepSeek-V4-Flash shapes through the whole engine on one device: agreement, memory, speed.

    python benchmarks/v4_gpu.py --out FOLDER [--layers 12] [--model random:deepseek-v4-flash]
        [--platform cuda] [--context 34816] [--quick] [--cold] [--only prefill]

Agreement: the same weights at 4 layers with the kernels that `auto` chooses, and with every op
pinned to its torch version, both in bf16; how far each is from the torch versions in float32. The
chosen kernels may be 1.25 times as far as the others. Speed: rows of the peers'
table (prefill, decode by batch), wall time with the host's work in it, and once more under
Zipf-skewed routing. Bytes, FLOPs and limits as the planner counts them, at rates measured here.
Captured steps must give the bits of their ops on the same shapes,
and no kernel may be compiled once the engine is ready: both are judged by a workload of mixed
lengths. ``--cold`` starts with empty caches of compiled kernels. Writes ``v4_gpu.json``; exit
status 1 when agreement, equality or readiness fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_check import ceilings, decode_seconds, prefill_seconds, prompt_logprobs, row, submit
from gpu_profile import kernel_shares, show
from lane import consumer_class

from metainfer.bench.conditions import conditions
from metainfer.core.errors import RefusedError
from metainfer.core.intent import Intent
from metainfer.core.request import Request, SamplingParams
from metainfer.engine.engine import Engine
from metainfer.engine.machine import open_machine
from metainfer.engine.protocol import Progress
from metainfer.kernels.compiles import CompileWatch
from metainfer.planner.opening import open_model

BAR = 1.25
"""Most that the chosen kernels' error may exceed that of the torch versions in the same type."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="random:deepseek-v4-flash")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--context", type=int, default=34816)
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    parser.add_argument("--cold", action="store_true", help="empty caches of compiled kernels")
    parser.add_argument("--skip-agreement", action="store_true")
    parser.add_argument("--zipf", action="store_true", help="the rows again, routing skewed")
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--skip-profile", action="store_true")
    parser.add_argument("--only", default="", help="rows whose name begins so")
    parser.add_argument("--consumer-class", action="store_true", help="see lane.py")
    args = parser.parse_args()
    report: dict[str, Any] = {"command": " ".join(sys.argv), "cold": args.cold}
    if args.consumer_class:
        consumer_class()
    if args.cold:
        for name in ("TRITON_CACHE_DIR", "METAINFER_CACHE"):
            os.environ[name] = tempfile.mkdtemp()
    args.out.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        (args.out / "v4_gpu.json").write_text(json.dumps(report, indent=1, default=str))

    report["ceilings"] = ceilings() if args.platform == "cuda" else {"copy_bytes_s": 2e10}
    if not args.skip_agreement:
        report["agreement"] = agreement(args)
        keep()
    if args.skip_speed:
        return 0 if report["agreement"]["ok"] else 1
    engine = started(args, report)
    keep()
    report["graphs"] = captured_against_eager(engine, args.quick)
    keep()
    report["rows"] = []
    for measured in rows(engine, args, report["ceilings"]):
        report["rows"].append(measured)
        keep()
    if args.zipf:
        skew(engine)
        report["rows_zipf"] = []
        for measured in rows(engine, args, report["ceilings"]):
            report["rows_zipf"].append(measured)
            keep()
    if args.platform == "cuda":
        report["peak_bytes"] = torch.cuda.max_memory_allocated()
    report["compiled_after_ready"] = engine.compiles.count
    keep()
    print(f"kernels compiled after ready: {engine.compiles.count}", *report["compiled_late"])
    fine = report.get("agreement", {}).get("ok", True) and report["graphs"]["ok"]
    return 0 if fine and not engine.compiles.count else 1


def captured_against_eager(engine: Engine, quick: bool) -> dict[str, Any]:
    """Logits of the same mixed workload, replayed and op by op: rows, and values that differ.

    Two of three requests draw, by graphs of their own or op by op: another token would change all
    logits behind it.
    """
    assert engine._executor is not None and engine.resolved is not None
    executor: Any = engine._executor
    limit, vocab = engine.resolved.plan.limits.max_context, engine.resolved.arch.vocab_size
    rng = random.Random(11)
    lengths = [rng.choice((1, 3, 70, 129, 500, 1100)) for _ in range(6 if quick else 24)]
    prompts = [[rng.randrange(20, vocab) for _ in range(min(n, limit - 40))] for n in lengths]

    def rows() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        finish = executor._finish

        def kept(segment: Any, logits: Any, *rest: Any) -> Any:
            if logits is not None:
                found.append(logits.float().cpu())
            return finish(segment, logits, *rest)

        executor._finish = kept
        for number, prompt in enumerate(prompts):
            kinds: tuple[Any, ...] = (
                {"temperature": 0.0},
                {"temperature": 0.9},
                {"temperature": 1.0, "top_p": 0.9},
            )
            params = SamplingParams(
                **kinds[number % 3], seed=number, max_tokens=24, ignore_eos=True
            )  # fmt: skip
            engine.submit(Request(f"graph-{number}-{time.monotonic_ns()}", tuple(prompt), params))
        while engine.has_work:
            engine.step()
        del executor._finish
        return found

    replayed = rows()
    with engine.eager():
        eager = rows()
    same = [len(a) for a in replayed] == [len(b) for b in eager]
    off = sum(int((a != b).sum()) for a, b in zip(replayed, eager, strict=True)) if same else -1
    replays = dict(executor._static.replays) if executor._static is not None else {}
    draws = engine.stats().step_draws
    print(
        f"captured against eager: {len(replayed)} steps, {off} values differ; replays {replays}, "
        f"draws {draws}"
    )
    return {
        "steps": len(replayed),
        "values_that_differ": off,
        "replays": replays,
        "draws": draws,
        "ok": off == 0,
    }


def agreement(args: argparse.Namespace) -> dict[str, Any]:
    """Errors of the log-probabilities of one prompt: chosen kernels, and torch alone."""
    model = f"{args.model}?layers=4"
    generator = torch.Generator().manual_seed(5)
    vocab = open_model(model).arch.vocab_size
    prompt = torch.randint(20, vocab, (700,), generator=generator).tolist()
    base = {"model": model, "platform": args.platform, "context": 1024, "concurrency": 2}
    pins, layouts = torch_pins(model, args.platform)

    def side(name: str, **wish: Any) -> torch.Tensor:
        begin = time.perf_counter()
        found = prompt_logprobs(Intent(**base, layouts=layouts, **wish), prompt)
        print(f"agreement, {name}: {time.perf_counter() - begin:.1f} s", flush=True)
        return found

    chosen = side("chosen")
    plain = side("torch", ops=pins)
    exact = side("torch, float32", ops=pins, dtype="float32")
    errors = {
        name: (float((side - exact).abs().mean()), float((side - exact).abs().max()))
        for name, side in (("chosen", chosen), ("torch", plain))
    }
    ok = errors["chosen"][0] <= BAR * errors["torch"][0]
    print(f"agreement with float32 (mean, worst nats): {errors}; bar {BAR}x of the mean: {ok}")
    return {"errors": errors, "bar": BAR, "tokens": len(prompt), "layouts": layouts, "ok": ok}


def torch_pins(model: str, platform: str) -> tuple[dict[str, str], dict[str, str]]:
    """Each op's torch version that serves both types in the layouts which `auto` chose; these."""
    machine = open_machine(platform)
    opened, wish = open_model(model), {"model": model, "platform": platform}
    plan = machine.resolve(opened, Intent(**wish, context=1024, concurrency=2)).plan
    pins: dict[str, str] = {}
    for key in plan.ops:
        op = key.partition("@")[0].partition(".")[0]
        for impl in () if op in pins else machine.registry.of(op):
            if impl.provider != "torch" or not {"bfloat16", "float32"} <= impl.dtypes:
                continue
            wanted = Intent(
                **wish, context=1024, concurrency=2, ops={op: impl.name}, layouts=dict(plan.bundle)
            )
            try:
                machine.resolve(opened, wanted)
            except RefusedError:
                continue
            pins[op] = impl.name
            break
    return pins, dict(plan.bundle)


def started(args: argparse.Namespace, report: dict[str, Any]) -> Engine:
    begin = time.perf_counter()
    notes = report["start_notes"] = list[tuple[float, str, str]]()
    late = report["compiled_late"] = list[str]()
    compiled = list[str]()

    def noted(progress: Progress) -> None:
        notes.append((time.perf_counter() - begin, progress.phase, progress.detail))
        if progress.seconds:
            print(f"{progress.phase} {progress.seconds:.1f} s", flush=True)

    if args.platform == "cuda":
        import triton  # noqa: F401 - what compiles from here on is told
    CompileWatch(compiled.append).open()
    engine = Engine(
        Intent(
            model=f"{args.model}?layers={args.layers}",
            platform=args.platform,
            context=args.context,
            concurrency=16 if args.quick else 128,
            prefix_cache=False,
            chunk_tokens=min(8192, args.context),
        ),
        noted,
        on_fault=lambda fault: late.append(fault.text),
    )
    info = engine.start()
    report["compiled_at_start"] = list(compiled)
    report["start_s"] = time.perf_counter() - begin
    report["start_phases"] = info.start_phases
    assert engine.resolved is not None and engine._executor is not None
    plan = engine.resolved.plan
    report["bundle"] = dict(plan.bundle)
    report["ops"] = {key: op.impl for key, op in plan.ops.items()}
    report["disproven"] = {
        f"{choice.request.op}/{loser.impl}": [reason.message for reason in loser.reasons]
        for choice in engine.resolved.selection.bundle.choices
        for loser in choice.rejected
        if any(reason.code == "disproven" for reason in loser.reasons)
    }
    for name, reasons in report["disproven"].items():
        print(f"{name}: {'; '.join(reasons)[:400]}")
    report["graphs_planned"] = [f"{g.phase} {g.tokens}/{g.runs}" for g in plan.graphs]
    report["not_captured"] = [
        loser.value for d in plan.decisions if d.key == "graph_buckets" for loser in d.losers
    ]
    report["conditions"] = conditions(plan)
    ledger = {kind: sum(r.bytes for r in plan.ledger if r.kind == kind) for kind in
              ("weights", "kv", "transient", "graphs")}  # fmt: skip
    report["ledger"], report["held"] = ledger, engine._executor.held_bytes
    print(f"start to ready {report['start_s']:.1f} s; ledger {ledger}; held {report['held']}")
    return engine


def counted(
    engine: Engine, runs: list[tuple[int, int]], scored: int, rates: dict[str, float]
) -> dict[str, float]:
    """What one step of (start, tokens) runs must move and multiply, and its limit here.

    The limit is the larger of bytes at the copy rate and FLOPs at the bf16 rate; the recipe's FP8
    products could take half of their part.
    """
    assert engine.resolved is not None
    cost = engine.resolved.chosen.cost
    assert cost is not None
    work = cost.runs(runs, scored=scored)
    flops = work.flops + work.attention
    memory, compute = work.moved / rates["copy_bytes_s"], flops / rates.get("bf16_flops", 1e12)
    return {"bytes": work.moved, "flops": flops, "limit_s": max(memory, compute)}


def prompt_limit(engine: Engine, tokens: int, rates: dict[str, float]) -> dict[str, float]:
    """`counted` over the chunks of one prompt."""
    assert engine.resolved is not None
    chunk = engine.resolved.plan.limits.step_tokens
    each = [
        counted(engine, [(s, min(chunk, tokens - s))], int(s + chunk >= tokens), rates)
        for s in range(0, tokens, chunk)
    ]
    return {key: sum(part[key] for part in each) for key in each[0]}


def told(name: str, seconds: list[float], work: dict[str, float]) -> dict[str, Any]:
    return row(name, seconds, work["limit_s"]) | work


def rows(engine: Engine, args: argparse.Namespace, rates: dict[str, float]) -> Any:
    batches: tuple[int, ...] = (1, 8) if args.quick else (1, 8, 32, 128)
    batches = batches if "decode".startswith(args.only) else ()
    for batch in batches:
        context = min(1024, args.context // 2)
        seconds = decode_seconds(engine, batch, context, steps=16)
        work = counted(engine, [(context, 1)] * batch, batch, rates)
        measured = told(f"decode, batch {batch}, context {context}", seconds, work)
        yield measured | decode_costs(engine, batch, args)
    lengths: tuple[int, ...] = (
        (2048, 8192) if args.quick else (1024, 2048, 4096, 8192, 16384, 32768)
    )
    lengths = lengths if "prefill".startswith(args.only) else ()
    for tokens in lengths:
        if tokens + 8 > args.context:
            continue
        seconds = prefill_seconds(engine, tokens, repeats=4)
        measured = told(f"prefill, {tokens} tokens", seconds, prompt_limit(engine, tokens, rates))
        if tokens in (2048, 8192):
            submit(engine, 1, tokens, 1)
            measured |= costs(engine, f"prefill {tokens}", args)
        yield measured
    if lengths and not args.quick and args.context > 8200:
        begin = time.perf_counter()
        submit(engine, 8, 8192, 1)
        while engine.has_work:
            engine.step()
        work = prompt_limit(engine, 8192, rates)
        whole = {key: 8 * value for key, value in work.items()}
        yield told("prefill, 8 x 8192 tokens", [time.perf_counter() - begin], whole)


def decode_costs(engine: Engine, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Largest kernels of four steps in which `batch` requests decode."""
    assert engine.resolved is not None
    mixed = engine.resolved.plan.limits.mixed_prefill_tokens
    tokens = min(1004, args.context // 2)
    submit(engine, batch, tokens, 16 + batch * tokens // mixed)
    fed = 0
    while fed < batch:
        outputs, _ = engine.step()
        fed = sum(len(output.tokens) for output in outputs)
    engine.step()  # launches two steps where one is launched ahead, and later turns one each
    found = costs(engine, f"decode {batch}", args, 4)
    while engine.has_work:
        engine.step()
    return found


def skew(engine: Engine) -> None:
    """Experts of each layer are chosen by Zipf's law (exponent 1), in an order of its own.

    Hash layers get tables drawn by the law. Where scores choose, logarithms of the law are their
    bias, weighed as the spread of random scores is to that of Gumbel noise (0.38 to 1.28).
    """
    executor: Any = engine._executor
    generator = torch.Generator().manual_seed(9)
    for layer in executor._parts.model.layers:
        experts = layer.gate.shape[0]
        law = 1.0 / (1.0 + torch.randperm(experts, generator=generator))
        if layer.by_token is not None:
            words, chosen = layer.by_token.shape
            drawn = torch.multinomial(law.expand(words, -1), chosen, generator=generator)
            layer.by_token.copy_(drawn)
        else:
            layer.bias.copy_(0.3 * law.log())


def costs(engine: Engine, title: str, args: argparse.Namespace, steps: int = 0) -> dict[str, Any]:
    """Kernel shares of the next `steps` steps, or of all work that is left."""
    if args.platform != "cuda" or args.skip_profile:
        return {}

    def drain() -> None:
        while engine.has_work:
            engine.step()

    found = kernel_shares(engine.step if steps else drain, steps or 1)
    show(title, found)
    return {"costs": found}


if __name__ == "__main__":
    sys.exit(main())
