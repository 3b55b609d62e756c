"""One rank of eight at full depth on one card: day-0 layout and collectives beside ours.

    python benchmarks/emulated_gpu.py --out FOLDER [--model random:deepseek-v4-flash]
        [--rank-of 8] [--machine 8x-rtx-pro-6000d] [--platform cuda] [--ours auto tp8 ...]

As ``metainfer bench offline --rank-of`` (`metainfer.bench.emulated`): one rank's kernels, launches,
shards and memory are measured here, its bytes cross this card's link, and each collective ends when
the cost model of the named machine says. Nothing of it is an answer; every row is labelled.
``emulated.json`` is written after every row, so a time limit from outside costs only what is left.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from metainfer.bench import emulated
from metainfer.bench.offline import OfflineOptions
from metainfer.core.intent import Intent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="random:deepseek-v4-flash")
    parser.add_argument("--rank-of", type=int, default=8)
    parser.add_argument("--machine", default="8x-rtx-pro-6000d")
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64], help="of all ranks")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens before a decode row")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens in each domain")
    parser.add_argument("--ours", nargs="+", default=[emulated.AUTO], help="layouts, in turn")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {text}", flush=True)

    def keep(document: dict[str, Any]) -> None:
        text = json.dumps(document, indent=1, default=str)
        (args.out / "emulated.json").write_text(text + "\n")

    wish = Intent(
        model=args.model,
        platform=args.platform,
        rank_of=args.rank_of,
        of_machine=args.machine,
        context=max(2 * args.prefill, args.prompt + 256),
        chunk_tokens=args.prefill,
        mixed_tokens=args.prefill,  # prompts of a large batch enter in few steps
        concurrency=max(args.batch),
    )
    options = OfflineOptions(
        prompt_tokens=args.prompt,
        output_tokens=33,
        batches=tuple(args.batch),
        prefill_tokens=args.prefill,
        repeats=3,
    )
    log(f"{args.model}, rank 0 of {args.rank_of} of {args.machine}")
    print(emulated.table(emulated.run(wish, options, log, keep, args.ours)))


if __name__ == "__main__":
    main()
