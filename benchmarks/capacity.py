"""Is the memory ledger true on this device: every item against its peak, and the promised limit.

    python benchmarks/capacity.py --out FOLDER [--model M ...] [--context N ...]

For each model: `tune capacity` twice, the second time with the record of the first; then a server's
engine with that record takes a prompt of the promised length, and refuses one that is 1 % longer.
Wanted: items within 3 % of what was measured, at most 2 % of the card without an item, the prompt
answered, the longer one refused with numbers. Exit status 1 where not. On a CPU only weights, cache
and transients can be judged.
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
from metainfer.engine.machine import open_machine

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


def judge(found: dict[str, Any], limit: dict[str, Any], card_bytes: int | None) -> list[str]:
    """What is not as it should be."""
    wrong = [
        f"{row['item']}: planned {row['planned_bytes']:,} B, measured {row['measured_bytes']:,} B "
        f"({row['difference']:+.1%})"
        for row in found["items"]
        if row["difference"] is not None and abs(row["difference"]) > WITHIN
    ]
    if card_bytes is not None:
        graphs = next((row for row in found["items"] if row["item"] == "graphs"), None)
        apart = 0 if graphs is None else abs(graphs["measured_bytes"] - graphs["planned_bytes"])
        if apart > UNEXPLAINED * card_bytes:
            wrong.append(f"{apart:,} B are in use without an item")
    if limit["answered"] != 1:
        wrong.append(f"a prompt of {limit['limit'] - 1:,} tokens was not answered")
    if not any(letter.isdigit() for letter in limit["refused"]):
        wrong.append(
            f"a prompt beyond the limit was not refused with numbers: {limit['refused']!r}"
        )
    return wrong


def measure(intent: Intent, options: CapacityOptions) -> dict[str, Any]:
    """One model: the ledger by its seeds, by its record, and the limit."""
    first = run(intent, options, log)
    again: dict[str, Any] = run(intent, options, log)
    limit = at_the_limit(intent)
    facts = open_machine(intent.platform).facts.device
    card = None if facts.kind == "cpu" else facts.memory_bytes
    wrong = judge(again, limit, card)
    return {
        "model": intent.model,
        "by_seeds": first,
        "by_record": again,
        "limit": limit,
        "wrong": wrong,
    }


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
        found = measure(intent, CapacityOptions(seconds=given.seconds))
        path = given.out / f"capacity-{number}.json"
        path.write_text(json.dumps(found, indent=1))
        log(f"{model}: {'; '.join(found['wrong']) or 'as it should be'} ({path})")
        failed = failed or bool(found["wrong"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
