"""Is the memory ledger true on this device: every item against its peak, and the promised limit.

    python benchmarks/capacity.py --out FOLDER [--model M ...] [--context N ...]

For each model: `tune capacity` twice, the second time with the record of the first; then a server's
engine with that record takes a prompt of the promised length, and refuses one that is 1 % longer.
Wanted: items within 3 % of what was measured, at most 2 % of the card in use beyond the ledger, the
prompt answered, the longer one refused with numbers. Exit status 1 where not. The file is written
after each of the three. On a CPU only weights, cache and transients can be judged.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from metainfer.bench.capacity import CapacityOptions, run
from metainfer.bench.offline import drawn_prompts
from metainfer.core.errors import RequestError
from metainfer.core.intent import Intent
from metainfer.core.request import Request, SamplingParams
from metainfer.engine.engine import Engine

MODELS = ("random:qwen3-8b", "random:deepseek-v4-flash?layers=12")
WITHIN, UNEXPLAINED, BEYOND = 0.03, 0.02, 1.01


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def at_the_limit(intent: Intent) -> dict[str, Any]:
    """A prompt that fills the promised context runs, one that is 1 % longer is refused."""
    engine = Engine(intent)
    info = engine.start()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (prompt,) = drawn_prompts(1, info.max_context - 1, info.vocab_size, 7)
    engine.submit(Request("limit", tuple(prompt), params))
    answered: list[int] = []
    while engine.has_work:
        for output in engine.step()[0]:
            answered += output.tokens
    longer = tuple(prompt) * 2
    refused = ""
    try:
        engine.submit(Request("beyond", longer[: int(info.max_context * BEYOND) + 1], params))
    except RequestError as error:
        refused = error.cause
    engine.close()
    return {"limit": info.max_context, "answered": len(answered), "refused": refused}


def judge(found: dict[str, Any], limit: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    wrong = [
        f"{row['item']}: planned {row['planned_bytes']:,} B, measured {row['measured_bytes']:,} B "
        f"({row['difference']:+.1%})"
        for row in found["items"]
        if row["difference"] is not None and abs(row["difference"]) > WITHIN
    ]
    device = found["device"]
    if device["unexplained"] is not None and device["unexplained"] > UNEXPLAINED:
        used, planned = device["used"], device["planned"]
        wrong.append(f"{used:,} B are in use, items explain {planned:,}")
    if limit["answered"] != 1:
        wrong.append(f"a prompt of {limit['limit'] - 1:,} tokens was not answered")
    if not any(letter.isdigit() for letter in limit["refused"]):
        wrong.append(
            f"a prompt beyond the limit was not refused with numbers: {limit['refused']!r}"
        )
    return wrong


def measure(intent: Intent, options: CapacityOptions, path: Path) -> list[str]:
    """One model: the ledger by its seeds, by its record, and the limit; what is wrong of it."""
    found: dict[str, Any] = {"model": intent.model}

    def keep(name: str, value: Any) -> None:
        found[name] = value
        path.write_text(json.dumps(found, indent=1))

    keep("by_seeds", run(intent, options, log))
    keep("by_record", run(intent, options, log))
    keep("limit", at_the_limit(intent))
    keep("wrong", judge(found["by_record"], found["limit"]))
    wrong: list[str] = found["wrong"]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--context", type=int)
    parser.add_argument("--chunk-tokens", type=int)
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--seconds", type=float, default=120.0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for number, model in enumerate(given.model or MODELS):
        intent = Intent(
            model=model,
            context=given.context,
            chunk_tokens=given.chunk_tokens,
            concurrency=given.concurrency,
        )
        path = given.out / f"capacity-{number}.json"
        wrong = measure(intent, CapacityOptions(seconds=given.seconds), path)
        log(f"{model}: {'; '.join(wrong) or 'as it should be'} ({path})")
        failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
