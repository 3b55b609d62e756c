"""Prefill of a tiny DeepSeek-V4 beside `transformers` on the same weights, in one run.

    python benchmarks/v4_prefill.py [--tokens 4096] [--repeats 5] [--out FILE]

Both sides compute the logits of the last row in float32 with the same threads; answers are compared
before anything is timed. The two alternate, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))

import torch
import v4
from harness import ask, start

from metainfer.core.request import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = measure(args.tokens, args.repeats, args.threads)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


def measure(tokens: int, repeats: int, threads: int) -> dict[str, Any]:
    """Seconds of both sides, alternating; prompts differ, so that no prefix is found again."""
    with tempfile.TemporaryDirectory() as folder:
        model = v4.tiny(0, max_position_embeddings=2 * tokens)
        model.save_pretrained(folder)
        engine = start(
            folder, threads=threads, context=tokens + 16, concurrency=1, prefix_cache=False
        )
        plan = engine.resolved.plan  # type: ignore[union-attr]
        generator = torch.Generator().manual_seed(1)
        ours: list[float] = []
        theirs: list[float] = []
        worst = 0.0
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
        for turn in range(repeats + 1):
            ids = torch.randint(3, 256, (1, tokens), generator=generator)
            begin = time.perf_counter()
            (answer,) = ask(engine, [ids[0].tolist()], params, audit=False)
            middle = time.perf_counter()
            with torch.inference_mode():
                logits = model(ids, logits_to_keep=1, use_cache=True).logits[0, -1]
            end = time.perf_counter()
            wanted = logits.double().log_softmax(-1)
            worst = max(worst, *(abs(wanted[t].item() - p) for t, p in answer.logprobs[0].top))
            if turn:  # the first round warms both
                ours.append(middle - begin)
                theirs.append(end - middle)
    return {
        "tokens": tokens,
        "threads": threads,
        "metainfer_s": spread(ours),
        "transformers_s": spread(theirs),
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "largest_logprob_difference": worst,
        "conditions": {
            "torch": torch.__version__,
            "bundle": dict(plan.bundle),
            "step_tokens": plan.limits.step_tokens,
            "ops": {k: v.impl for k, v in plan.ops.items() if k.endswith("@chunk")},
        },
    }


def spread(seconds: list[float]) -> dict[str, float]:
    median = statistics.median(seconds)
    mad = statistics.median(abs(s - median) for s in seconds)
    return {"median": median, "mad": mad, "n": len(seconds)}


if __name__ == "__main__":
    main()
