"""What a chunk that no graph holds costs the host, layout by layout.

    python benchmarks/launches.py --out FILE [--layers 12] [--layouts ep2 cp2/dp2ep2 cp2/tp2 tp2]
        [--model random:deepseek-v4-flash] [--platform cuda] [--seconds 110]

Every layout runs without graphs, ranks on a card each, one layout after the other in this process.
Chunks of 64 and 512 tokens compute for less than their host launches, so their wall time is the
host's; of 1,024 tokens in two chunks the second reads a cache. Beside them what one of torch's own
calls costs: cached entries lifted and laid as chunks whose rows ranks share do, by the call, the
device never waited for. ``FILE`` is written after every layout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from gpu_check import prefill_seconds

from metainfer.core.intent import Intent
from metainfer.engine.engine import Engine
from metainfer.kv.book.form import plain
from metainfer.kv.store.entries import EntryPages
from metainfer.kv.store.moving import lay, lift

MODEL, LAYOUTS = "random:deepseek-v4-flash", ("ep2", "cp2/dp2ep2", "cp2/tp2", "tp2")
CHUNK, PROMPTS = 512, (64, 512, 1024)
CALLS, AT_ONCE = 12, 20
"""Of torch in a `lift` and the `lay` behind it, its rows picked in between: see `moved_us`; how
often they are enqueued before the device is waited for."""


def moved_us(device: str) -> dict[str, float]:
    """Host microseconds of entries lifted, picked and laid twice, as those of one shared cache."""
    pages = EntryPages(0, torch.zeros(64, 128, 512, device=device, dtype=torch.bfloat16),
                       plain("latent@1", 512, "bfloat16"), 128)  # fmt: skip
    slots, seconds = torch.arange(512, device=device), []
    for _ in range(20):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(AT_ONCE):
            found = lift(pages, slots)
            for _ in range(2):
                lay(pages, slots, found.index_select(0, slots))
        seconds.append((time.perf_counter() - begin) / AT_ONCE)
    median = sorted(seconds)[len(seconds) // 2]
    return {"cache_us": 1e6 * median, "call_us": 1e6 * median / CALLS}


def row(tokens: int, seconds: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    mad = statistics.median(abs(each - median) for each in seconds)
    return {"tokens": tokens, "median_s": median, "mad_s": mad, "n": len(seconds)}


def chunks(args: argparse.Namespace, layout: str) -> dict[str, Any]:
    joint = "&" if "?" in args.model else "?"
    model = f"{args.model}{joint}layers={args.layers}" if args.layers else args.model
    cuda, pair = args.platform == "cuda", "/" in layout
    meet = "host" if cuda and layout != "single" else None
    intent = Intent(
        model=model, platform=args.platform, parallel=layout, context=2048, concurrency=4,
        chunk_tokens=CHUNK, graphs=False, prefix_cache=False, halves=0,
        collectives=meet, prefill_from=0 if pair else None,
    )  # fmt: skip
    engine, begin = Engine(intent), time.monotonic()
    engine.start()
    start_s = time.monotonic() - begin
    try:
        rows = [row(n, prefill_seconds(engine, n, 11 if cuda else 3)) for n in PROMPTS]
    finally:
        engine.close()
    return {"start_s": round(start_s, 1), "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--layers", type=int, default=12, help="0: as the model is")
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--seconds", type=float, default=110)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if args.platform == "cuda" else "host",
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
        "torch_calls": moved_us(args.platform),
        "layouts": {},
    }
    for layout in args.layouts:
        if end - time.monotonic() < 20:
            report["layouts"][layout] = {"skipped": "no time left"}
        else:
            report["layouts"][layout] = chunks(args, layout)
        args.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report["torch_calls"]))
    for layout, said in report["layouts"].items():
        cells = [f"{1e3 * each['median_s']:.1f}" for each in said.get("rows", [])]
        print(layout, said.get("start_s", said.get("skipped")), *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
