"""Structured output and enforced calls: is every answer valid, and what does a mask cost?

    python benchmarks/structured.py [--schemas 500] [--model smollm2-135m] [--library llguidance]
                                    [--part masks]

Random JSON schemas (hypothesis, seeded) are answered with each grammar library: as text, and as the
call of a tool that has them as its arguments. By an engine over a tiny random model, in batches of
25 at temperatures 0 to 2, with and without drafts: every answer that ends must fit, every call must
be read back by the parser and fit. And by drawing from the masks over MODEL's vocabulary without
a model, uniformly (which tries to break out all the time) and by the longest token, with one mask
a token timed: compute and unpack to V flags, then accept; by the wall's time and by this thread's
own (what an idle machine would take). `unspellable`: a schema insists on a character for which the
vocabulary has no bytes. `refused`: the library cannot express it. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "grammar"))

from schemas import schemas

from metainfer.bench.conditions import commit
from metainfer.core import parts
from metainfer.core.intent import Intent
from metainfer.core.request import FinishReason, GrammarSpec, Request, SamplingParams
from metainfer.engine.engine import Engine
from metainfer.engine.grammars import vocabulary_of
from metainfer.engine.model_text import load_text
from metainfer.grammar.backend import DEAD_END, GrammarError, Vocabulary
from metainfer.grammar.backends import KNOWN, opened
from metainfer.grammar.library import Library
from metainfer.grammar.rules import json_spec
from metainfer.text.answer import AnswerParser
from metainfer.text.call_forms import CallRule, form_of, only_calls
from metainfer.text.markup import DEEPSEEK, QWEN3, Markup, Opening
from metainfer.text.scan import symbol

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


def fits(value: Any, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    except jsonschema.ValidationError:
        return False
    return True


def valid(text: bytes, schema: dict[str, Any]) -> bool:
    try:
        return fits(json.loads(text.decode("utf-8")), schema)
    except ValueError:
        return False


class Calls:
    """Enforced calls of one tool in a family's form. `ids`: markers that are tokens."""

    def __init__(self, markup: Markup, ids: dict[str, int]) -> None:
        assert markup.calls is not None
        self.markup, self.ids = markup, ids
        self.symbols = {marker: symbol(place) for place, marker in enumerate(ids)}
        self.form = form_of(markup.calls, ids)

    def spec(self, schema: dict[str, Any]) -> GrammarSpec:
        rule = CallRule("look_up", tool_of(schema))
        return GrammarSpec("parts", parts.encode(only_calls(self.form, [rule], 1)))

    def valid(self, pieces: list[bytes], drawn: list[int], schema: dict[str, Any]) -> bool:
        """Whether the parser reads one call out of it, valid under its schema, and nothing else."""
        shown = dict(zip(self.ids.values(), self.symbols.values(), strict=True))
        text, run = "", b""
        for token in drawn:
            if token in shown:
                text, run = text + run.decode() + shown[token], b""
            else:
                run += pieces[token]
        parser = AnswerParser(self.markup, Opening.CONTENT, calls="enforced", symbols=self.symbols)
        answers = [parser.push(text + run.decode()), parser.finish()]
        calls = [call for answer in answers for call in answer.calls]
        clean = not parser.notes and not any(answer.content for answer in answers)
        return len(calls) == 1 and clean and fits(json.loads(calls[0].arguments), tool_of(schema))


def tool_of(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema: `schema` where it is an object's, else with it as its only argument."""
    if schema.get("type") == "object":
        return schema
    return {"type": "object", "properties": {"value": schema}, "required": ["value"]}


def answers(wanted: list[dict[str, Any]], draft: str, library: str, calls: bool) -> dict[str, Any]:
    """How a tiny random model answers every schema, as text or as a call of a tool."""
    intent = Intent(
        model="random:tiny-llama", concurrency=BATCH, draft=draft, threads=1, grammar=library
    )
    engine = Engine(intent)
    engine.start()
    tokenizer = load_text("random:tiny-llama", 320).tokenizer
    spelled = Calls(QWEN3, {})
    pieces = [tokenizer.token_bytes(token) for token in range(320)]
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
                grammar=spelled.spec(schema) if calls else json_spec(schema, "schema"),
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
            if stopped and calls:
                count["invalid"] += not spelled.valid(pieces, tokens[place], schema)
            elif stopped:
                count["invalid"] += not valid(text, schema)
    engine.close()
    return count | {"texts": texts}


def masks(
    wanted: list[dict[str, Any]], vocabulary: Vocabulary, name: str, calls: Calls | None
) -> dict[str, Any]:
    """Seconds per mask, per accept and per compile over a real vocabulary. Every second schema's
    tokens are drawn uniformly, the others' are the longest that are allowed."""
    library = Library(opened(name, vocabulary), kept=len(wanted))
    lengths = np.array([len(piece) for piece in vocabulary.pieces])
    rng = np.random.default_rng(0)
    compiles, first, later, accepts, processor = [], [], [], [], []
    count = {"refused": 0, "ended": 0, "cut": 0, "invalid": 0, "unspellable": 0, "failed": 0}
    for number, schema in enumerate(wanted):
        spec = json_spec(schema, "schema") if calls is None else calls.spec(schema)
        begin = time.perf_counter()
        try:
            library.get(spec)
        except GrammarError:
            count["refused"] += 1
            continue
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
                pieces = list(vocabulary.pieces)
                if calls is None:
                    good = valid(b"".join(pieces[i] for i in drawn), schema)
                else:
                    good = calls.valid(pieces, drawn, schema)
                count["invalid"] += not good
                break
            drawn.append(token)
    return count | {
        "compile_ms": spread(compiles),
        "mask_ms": spread(first + later),
        "mask_processor_ms": spread(processor),
        "first_mask_ms": spread(first),
        "accept_ms": spread(accepts),
    }


def calls_over(vocabulary: Vocabulary) -> dict[str, Calls]:
    """The families' calls over a vocabulary. Where a marker has to be a token, a special token that
    the model has for something else stands for it."""
    spare = [token for token in vocabulary.control if token not in vocabulary.ends]
    dsml = {"｜DSML｜": spare[0]}
    hermes = {"<tool_call>": spare[1], "</tool_call>": spare[2]}
    return {"dsml": Calls(DEEPSEEK, dsml), "hermes": Calls(QWEN3, hermes)}


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
    parser.add_argument("--library", choices=list(KNOWN), action="append")
    parser.add_argument("--part", choices=["engine", "masks"], action="append")
    options = parser.parse_args()
    warnings.simplefilter("ignore", hypothesis.errors.NonInteractiveExampleWarning)
    libraries = options.library or list(KNOWN)
    wished = options.part or ["engine", "masks"]
    wanted = draw(options.schemas)
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "load_average": os.getloadavg()[0],
        "cpus": os.cpu_count(),
        "schemas": len(wanted),
        "hypothesis": hypothesis.__version__,
        "model": options.model,
        "libraries": {},
    }
    tokenizer = load_text(options.model, options.vocabulary).tokenizer
    vocabulary = vocabulary_of(tokenizer, options.vocabulary, tokenizer.eos_ids)
    for name in libraries:
        found: dict[str, Any] = {"version": metadata.version(name)}
        if "engine" in wished:
            for kind, calls in (("text", False), ("calls", True)):
                plain = answers(wanted, "off", name, calls)
                drafted = answers(wanted, "ngram:4", name, calls)
                same = plain.pop("texts") == drafted.pop("texts")
                found[f"engine_{kind}"] = {
                    "drafts_change_nothing": same, "plain": plain, "with_drafts": drafted
                }  # fmt: skip
        forms = {"text": None} | {f"calls_{n}": f for n, f in calls_over(vocabulary).items()}
        for kind, form in forms.items() if "masks" in wished else ():
            found[kind] = masks(wanted, vocabulary, name, form)
        report["libraries"][name] = found
    report["load_average_at_end"] = os.getloadavg()[0]
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
