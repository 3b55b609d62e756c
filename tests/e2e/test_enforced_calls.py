"""Enforced calls through the engine: a random model's calls are valid, with and without drafts."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from harness import Answer, ask, start
from speculation import DEEPEST, Mixed, drafted_by, same

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from fake_texts import byte_qwen

from metainfer.core import parts
from metainfer.core.request import FinishReason, GrammarSpec, SamplingParams
from metainfer.core.step import RequestOutput
from metainfer.engine.engine import Engine
from metainfer.engine.model_text import TextTools, load_text
from metainfer.server.structured import marker_ids, placed
from metainfer.text.call_forms import CallRule, form_of, only_calls, text_with_calls
from metainfer.text.dialogue import Conversation, Prompt, Turn
from metainfer.text.markup import Opening

MODEL = "random:tiny-deepseek-v4"
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["é", "f"]},
        "days": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 2},
    },
    "required": ["place", "days"],
}
RULES = [CallRule("look", SCHEMA), CallRule("now", {"type": "object", "properties": {}})]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = start(MODEL, prefix_cache=False, draft=f"ngram:{DEEPEST}", concurrency=8, context=700)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def text(engine: Engine) -> TextTools:
    assert engine.resolved is not None
    return load_text(MODEL, engine.resolved.arch.vocab_size)


def prompt_of(text: TextTools, thinking: bool) -> Prompt:
    turns = (Turn("user", ("Where?",)),)
    return text.format.encode(Conversation(turns=turns, thinking=thinking))


def spec_of(
    text: TextTools, prompt: Prompt, *, must: bool = True, most: int | None = None
) -> GrammarSpec:
    assert text.format.markup.calls is not None
    form = form_of(text.format.markup.calls, marker_ids(text))
    part = (only_calls if must else text_with_calls)(form, RULES, most)
    return placed(GrammarSpec("parts", parts.encode(part)), text, prompt, "tools")


def read(text: TextTools, prompt: Prompt, params: SamplingParams, answer: Answer) -> Any:
    """What the client gets."""
    stream = text.answer_stream([], params, prompt, calls="enforced")
    delta = stream.push(RequestOutput("r", tuple(answer.tokens), finish=answer.finish))
    for call in delta.calls:
        schema = next(rule.schema for rule in RULES if rule.name == call.name)
        jsonschema.validate(json.loads(call.arguments), schema or {})
    return delta, stream.notes


def test_a_random_model_calls_what_it_must(engine: Engine, text: TextTools) -> None:
    """Behind reasoning and without, at any temperature."""
    drafted_by(engine, None)
    done = text.tokenizer.token_id("</think>")
    assert done is not None
    prompts = [prompt_of(text, thinking=i % 2 == 0) for i in range(6)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.0, 0.7, 1.0, 2.0, 2.0)[i],
            seed=i,
            max_tokens=230,
            grammar=spec_of(text, prompt, most=1),
            logit_bias={done: 8.0},
        )
        for i, prompt in enumerate(prompts)
    ]
    answers = ask(engine, [p.ids for p in prompts], params, eos=text.tokenizer.eos_ids)
    ended = 0
    for prompt, each, answer in zip(prompts, params, answers, strict=True):
        assert answer.finish in (FinishReason.STOP, FinishReason.LENGTH), answer.error
        delta, notes = read(text, prompt, each, answer)
        assert not delta.text.strip("\n<")  # a cut before the first tag may leave these
        if answer.finish is FinishReason.STOP:
            ended += 1
            assert len(delta.calls) == 1 and delta.finish == "tool_calls" and not notes
    assert ended >= 3


@pytest.mark.parametrize("must", [True, False], ids=["calls", "text"])
def test_b23_enforced_calls_under_drafts(
    engine: Engine, text: TextTools, must: bool, seed: int
) -> None:
    """The same tokens, and drafts that were accepted inside calls."""
    prompt = prompt_of(text, thinking=False)
    spec = spec_of(text, prompt, must=must)
    biased = {} if must else dict.fromkeys(marker_ids(text).values(), 9.0)
    params = [
        SamplingParams(
            temperature=temperature, seed=3, max_tokens=100, grammar=spec, logit_bias=biased
        )
        for temperature in (0.0, 0.9)
    ]
    eos = text.tokenizer.eos_ids
    plain = ask(drafted_by(engine, None), [prompt.ids] * 2, params, eos=eos)
    assert engine.resolved is not None
    drafts = Mixed(random.Random(seed), engine.resolved.arch.vocab_size, 0.75)
    drafts.most = DEEPEST
    for each, answer in zip(params, plain, strict=True):
        drafts.learn(prompt.ids, each, answer.tokens)
    before = engine.stats()
    drafted = ask(drafted_by(engine, drafts), [prompt.ids] * 2, params, eos=eos)
    for answer, wanted in zip(drafted, plain, strict=True):
        same(answer, wanted)
    assert engine.stats().accepted_drafts > before.accepted_drafts + 10


def test_markers_that_are_spelled(seed: int) -> None:
    """A vocabulary without the family's markers: they are written letter by letter, and read."""
    reference = "random:tiny-llama"
    engine = start(reference, dtype="float64", concurrency=4)
    assert engine.resolved is not None
    tokenizer = load_text(reference, engine.resolved.arch.vocab_size).tokenizer
    text = TextTools(tokenizer, byte_qwen(320).format)
    prompt = Prompt(list(b"Answer: "), Opening.CONTENT)
    spec = spec_of(text, prompt, most=1)
    assert '"id"' not in spec.text
    params = [
        SamplingParams(temperature=1.0, seed=seed % 1000 + i, max_tokens=400, grammar=spec)
        for i in range(4)
    ]
    answers = ask(engine, [prompt.ids] * 4, params, eos=(0,))
    ended = 0
    for each, answer in zip(params, answers, strict=True):
        delta, notes = read(text, prompt, each, answer)
        if answer.finish is FinishReason.STOP:
            ended += 1
            assert delta.calls and not delta.text and not notes
    assert ended
    engine.close()
