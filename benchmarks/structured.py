"""Structured output: is every answer valid, and what does a mask cost?

    python benchmarks/structured.py [--schemas 500] [--model smollm2-135m] [--skip-engine]

Random JSON schemas (hypothesis, seeded) are answered twice. By an engine over a tiny random model,
in batches of 25 at temperatures 0 to 2: every answer that ends must fit its schema. And by drawing
from the masks over MODEL's vocabulary without a model, uniformly (which tries to break out all the
time) and by the longest token, with one mask a token timed: compute and unpack to V flags, then
accept; by the wall's time and by this thread's own (what an idle machine would take).
`unspellable`: a schema insists on a character for which the vocabulary has no bytes.
Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "grammar"))

from schemas import schemas

from metainfer.bench.conditions import commit
from metainfer.core.intent import Intent
from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.engine.engine import Engine
from metainfer.engine.grammars import vocabulary_of
from metainfer.engine.model_text import load_text
from metainfer.grammar.backend import DEAD_END, Vocabulary
from metainfer.grammar.library import Library
from metainfer.grammar.llg import LLGuidance
from metainfer.grammar.rules import json_spec

BATCH = 25
LONGEST = 400


def draw(count: int) -> list[dict[str, Any]]:
    """`count` different schemas, the same ones in every run of one hypothesis version."""
    found: dict[str, dict[str, Any]] = {}

    @seed(0)
    @settings(
        max_examples=4 * count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schema=schemas())
    def collect(schema: dict[str, Any]) -> None:
        found.setdefault(json.dumps(schema), schema)

    collect()
    return list(found.values())[:count]


def valid(text: bytes, schema: dict[str, Any]) -> bool:
    try:
        value = json.loads(text.decode("utf-8"))
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def answers(wanted: list[dict[str, Any]], draft: str) -> dict[str, Any]:
    """How a tiny random model answers every schema."""
    engine = Engine(Intent(model="random:tiny-llama", concurrency=BATCH, draft=draft, threads=1))
    engine.start()
    tokenizer = load_text("random:tiny-llama", 320).tokenizer
    count = {"asked": len(wanted), "ended": 0, "cut": 0, "invalid": 0, "failed": 0}
    texts: list[bytes] = []
    for first in range(0, len(wanted), BATCH):
        batch = wanted[first : first + BATCH]
        tokens: list[list[int]] = [[] for _ in batch]
        ends: dict[int, FinishReason] = {}
        for place, schema in enumerate(batch):
            params = SamplingParams(
                temperature=(0.0, 0.7, 1.0, 2.0)[place % 4],
                seed=first + place,
                max_tokens=LONGEST,
                grammar=json_spec(schema, "schema"),
            )
            engine.submit(Request(str(place), tuple(b"Answer: "), params, (0,)))
        while engine.has_work:
            for output in engine.step()[0]:
                tokens[int(output.request_id)] += output.tokens
                if output.finish is not None:
                    ends[int(output.request_id)] = output.finish
        for place, schema in enumerate(batch):
            text = tokenizer.join(tokens[place])
            texts.append(text)
            stopped = ends[place] is FinishReason.STOP
            count["ended"] += stopped
            count["cut"] += ends[place] is FinishReason.LENGTH
            count["failed"] += ends[place] is FinishReason.ERROR
            count["invalid"] += stopped and not valid(text, schema)
    engine.close()
    return count | {"texts": texts}


def masks(wanted: list[dict[str, Any]], vocabulary: Vocabulary) -> dict[str, Any]:
    """Seconds per mask, per accept and per compile over a real vocabulary."""
    library = Library(LLGuidance(vocabulary), kept=len(wanted))
    lengths = np.array([len(piece) for piece in vocabulary.pieces])
    rng = np.random.default_rng(0)
    compiles, first, later, accepts, processor = [], [], [], [], []
    count = {"ended": 0, "cut": 0, "invalid": 0, "unspellable": 0, "failed": 0}
    for number, schema in enumerate(wanted):
        spec = json_spec(schema, "schema")
        begin = time.perf_counter()
        library.get(spec)
        compiles.append(time.perf_counter() - begin)
        state = library.open(spec, ())
        drawn: list[int] = []
        while True:
            own, begin = time.thread_time(), time.perf_counter()
            allowed = state.allowed(())
            processor.append(time.thread_time() - own)
            (later if drawn else first).append(time.perf_counter() - begin)
            ids = allowed.nonzero()[0]
            if state.fault:
                count["unspellable" if state.fault == DEAD_END else "failed"] += 1
                break
            if len(drawn) == LONGEST:
                count["cut"] += 1
                break
            token = int(ids[lengths[ids].argmax()] if number % 2 else rng.choice(ids))
            begin = time.perf_counter()
            state.accept([token])
            accepts.append(time.perf_counter() - begin)
            if token in vocabulary.ends:
                count["ended"] += 1
                text = b"".join(vocabulary.pieces[i] for i in drawn)
                count["invalid"] += not valid(text, schema)
                break
            drawn.append(token)
    return count | {
        "compile_ms": spread(compiles),
        "mask_ms": spread(first + later),
        "mask_processor_ms": spread(processor),
        "first_mask_ms": spread(first),
        "accept_ms": spread(accepts),
    }


def spread(seconds: list[float]) -> dict[str, float]:
    values = np.array(seconds) * 1e3
    names = {"median": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}
    found = {name: round(float(np.percentile(values, at)), 4) for name, at in names.items()}
    return {"n": len(values), "mean": round(float(values.mean()), 4), **found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--skip-engine", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore", hypothesis.errors.NonInteractiveExampleWarning)
    import llguidance

    wanted = draw(options.schemas)
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "load_average": os.getloadavg()[0],
        "cpus": os.cpu_count(),
        "schemas": len(wanted),
        "llguidance": llguidance.get_version(),
        "hypothesis": hypothesis.__version__,
    }
    if not options.skip_engine:
        plain = answers(wanted, "off")
        drafted = answers(wanted, "ngram:4")
        report["drafts_change_nothing"] = plain.pop("texts") == drafted.pop("texts")
        report["engine"], report["engine_with_drafts"] = plain, drafted
    tokenizer = load_text(options.model, options.vocabulary).tokenizer
    vocabulary = vocabulary_of(tokenizer, options.vocabulary, tokenizer.eos_ids)
    report["model"] = options.model
    report["masks"] = masks(wanted, vocabulary)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
