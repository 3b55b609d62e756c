"""B-23: every feature means the same with and without drafts, greedy and seeded, for every row.

The row behind i accepted drafts must see them: in its penalties, in its number of generated tokens,
in its grammar, in its draw. Drafts are three quarters right here, so rows of every offset count.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from harness import Answer, ask, start
from speculation import DEEPEST, Mixed, drafted_by, same

from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.core.step import StepPlan
from metainfer.engine.engine import Engine
from metainfer.executor.local import LocalExecutor

MODEL = "random:tiny-llama"
VOCAB = 320
PROMPTS = [[3, 4, 5, 6], [9, 8, 7, 6, 5, 4], [100, 200]]
LENGTH = 40

PENALTIES = {
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "negative-frequency": {"frequency_penalty": -0.3},
    "all-penalties": {
        "repetition_penalty": 0.8,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.4,
    },
}
FEATURES: dict[str, dict[str, Any]] = {
    **PENALTIES,
    "bias": {"logit_bias": dict.fromkeys(range(0, VOCAB, 7), 4.0)},
    "bias-and-penalties": {"logit_bias": {1: 9.0, 2: 9.0, 3: 8.0}, "frequency_penalty": 2.0},
    "logprobs": {"logprobs": 0},
    "top-logprobs": {"logprobs": 20},
    "prompt-logprobs": {"prompt_logprobs": 3, "logprobs": 3},
    "filters": {"top_k": 9, "top_p": 0.9, "min_p": 0.01},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = start(
        MODEL, dtype="float64", prefix_cache=False, draft=f"ngram:{DEEPEST}", concurrency=4
    )
    yield engine
    engine.close()


def params_of(temperature: float, **more: Any) -> list[SamplingParams]:
    given = {"temperature": temperature, "max_tokens": LENGTH, **more}
    return [SamplingParams(seed=seed, **given) for seed in range(len(PROMPTS))]


def taught(params: Sequence[SamplingParams], answers: Sequence[Answer], seed: int) -> Mixed:
    drafts = Mixed(random.Random(seed), VOCAB, 0.75)
    drafts.most = DEEPEST
    for prompt, each, answer in zip(PROMPTS, params, answers, strict=True):
        drafts.learn(prompt, each, answer.tokens)
    return drafts


def both(engine: Engine, params: Sequence[SamplingParams], seed: int, **more: Any) -> list[Answer]:
    """Answers without drafts, after the same with drafts were found equal."""
    plain = ask(drafted_by(engine, None), PROMPTS, params, **more)
    before = engine.stats()
    drafted = ask(drafted_by(engine, taught(params, plain, seed)), PROMPTS, params, **more)
    after = engine.stats()
    for answer, wanted in zip(drafted, plain, strict=True):
        same(answer, wanted)
    accepted = after.accepted_drafts - before.accepted_drafts
    assert 0 < accepted < after.drafted_tokens - before.drafted_tokens
    return plain


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", list(FEATURES))
def test_b23_a_feature_under_drafts(
    engine: Engine, name: str, temperature: float, seed: int
) -> None:
    with_it = both(engine, params_of(temperature, **FEATURES[name]), seed)
    without = ask(drafted_by(engine, None), PROMPTS, params_of(temperature))
    changed = sum(a.tokens != b.tokens for a, b in zip(with_it, without, strict=True))
    quiet = "logprobs" in name or (name == "filters" and temperature == 0.0)
    assert changed == 0 if quiet else changed > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_b23_neighbours_with_other_features(engine: Engine, temperature: float, seed: int) -> None:
    """One batch, each request with its own wishes: rows do not mix up whose they are."""
    wishes = [FEATURES["all-penalties"], FEATURES["bias"], FEATURES["top-logprobs"]]
    params = [
        SamplingParams(seed=4, temperature=temperature, max_tokens=LENGTH, **wish)
        for wish in wishes
    ]
    both(engine, params, seed)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("by", ["stop id", "end id"])
def test_b23_end_ids_and_min_tokens(engine: Engine, temperature: float, by: str, seed: int) -> None:
    """The end is banned exactly until `min_tokens`, wherever in a verify run that is."""
    base = ask(drafted_by(engine, None), PROMPTS, params_of(temperature))
    ends = tuple(answer.tokens[5] for answer in base)
    given = {"stop_token_ids": ends} if by == "stop id" else {}
    more = {"eos": ends} if by == "end id" else {}
    stopped = both(engine, params_of(temperature, **given), seed, **more)
    assert all(a.finish is FinishReason.STOP and len(a.tokens) <= 5 for a in stopped)
    for least in (6, 7, 8, 20):
        longer = both(engine, params_of(temperature, min_tokens=least, **given), seed, **more)
        assert all(len(answer.tokens) >= least for answer in longer)
        assert not any(set(answer.tokens[:least]) & set(ends) for answer in longer)


class NoneOfTheLast:
    """A toy grammar: no id of the latest three, and even ids only after odd places."""

    fault = ""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def allowed(self, ahead: Sequence[int]) -> np.ndarray:
        text = [*self.drawn, *ahead]
        mask = np.arange(VOCAB) % 2 == len(text) % 2
        mask[text[-3:]] = False
        return mask

    def accept(self, tokens: Sequence[int]) -> None:
        self.drawn += tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_b23_a_grammar_sees_the_drafts_before_its_row(
    temperature: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(MODEL, dtype="float64", prefix_cache=False, draft="ngram:7", concurrency=4)
    executor = engine._executor
    assert isinstance(executor, LocalExecutor)
    slots, apply = executor._slots, executor._slots.apply

    def with_grammar(plan: StepPlan) -> None:
        apply(plan)
        for entry in plan.new:
            if entry.slot != 2:  # the third request has none
                slots.states[entry.slot].grammar = NoneOfTheLast()

    monkeypatch.setattr(slots, "apply", with_grammar)
    answers = both(engine, params_of(temperature), seed)
    for answer in answers[:2]:
        assert [token % 2 for token in answer.tokens] == [i % 2 for i in range(LENGTH)]
        for i, token in enumerate(answer.tokens):
            assert token not in answer.tokens[max(0, i - 3) : i]
    assert len({token % 2 for token in answers[2].tokens[::2]}) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_b23_a_stop_string_inside_an_accepted_run(
    engine: Engine, temperature: float, seed: int
) -> None:
    """Text, tokens and usage are the same; what came in the same output behind it is dropped."""
    from metainfer.engine.model_text import byte_text
    from metainfer.engine.text_stream import TextStream

    tokenizer = byte_text(VOCAB).tokenizer
    params = params_of(temperature)
    base = ask(drafted_by(engine, None), PROMPTS, params)
    source = taught(params, base, seed)
    for at in range(4, 30):
        tokens = base[0].tokens
        stop = tokenizer.decode(tokens[at : at + 2])
        if "�" in stop:
            continue
        told, cut = [], 0
        for drafts in (None, source):
            drafted_by(engine, drafts)
            stream = TextStream(tokenizer, [stop], params=params[0])
            engine.submit(Request(f"{at}", tuple(PROMPTS[0]), params[0]))
            text, kept = "", []
            while stream.finish is None:
                (output,) = engine.step()[0]
                delta = stream.push(output)
                text += delta.text
                kept += delta.tokens
                cut += len(output.tokens) - len(delta.tokens)
            engine.cancel([f"{at}"])
            engine.scheduler.audit()
            told.append((text, kept, stream.completion_tokens, stream.finish))
        assert told[0] == told[1]
        assert told[0][3] == "stop" and stop not in told[0][0]
        if cut:
            return
    pytest.fail("no stop string fell inside an accepted run")


def poisoned(engine: Engine, monkeypatch: pytest.MonkeyPatch, rows: slice) -> None:
    """NaN in `rows` of each run that verifies; the engine runs one request at a time."""
    executor = engine._executor
    assert isinstance(executor, LocalExecutor)
    model = executor._parts.model
    logits = model.logits

    def broken(*args: Any) -> Any:
        found = logits(*args)
        if found.shape[0] > 1:
            found[rows] = float("nan")
        return found

    monkeypatch.setattr(model, "logits", broken)


def test_a_broken_row_behind_a_rejected_draft_is_no_fault(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without drafts that row would never have been computed."""
    params = SamplingParams(temperature=0.0, max_tokens=20)
    (wanted,) = ask(drafted_by(engine, None), PROMPTS[:1], params)
    wrong = Mixed(random.Random(1), VOCAB, 1.0)
    wrong.most = DEEPEST
    wrong.learn(PROMPTS[0], params, [(token + 1) % VOCAB for token in wanted.tokens])
    poisoned(engine, monkeypatch, slice(1, None))
    (answer,) = ask(drafted_by(engine, wrong), PROMPTS[:1], params)
    same(answer, wanted)
    wrong.learn(PROMPTS[0], params, wanted.tokens)  # now the broken rows count
    (answer,) = ask(engine, PROMPTS[:1], params)
    assert answer.finish is FinishReason.ERROR and "NaN" in answer.error


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_weights_repeat_themselves_faster() -> None:
    """SmolLM2-135M with the drafter that users get: the same greedy answer in fewer steps."""
    from metainfer.core.errors import UserError
    from metainfer.planner.opening import open_model
    from metainfer.text.tokenizer import Tokenizer

    try:
        opened = open_model("smollm2-135m")
    except UserError as error:
        pytest.skip(f"the model is not to be had: {error}")
    tokenizer = Tokenizer.from_gguf_metadata(opened.source.gguf_metadata)
    prompts = [
        tokenizer.encode(
            "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\n"
        ),
        tokenizer.encode("One, two, three. One, two, three. One, two,"),
        tokenizer.encode("The capital of France is"),
    ]
    engine = start("smollm2-135m", context=256, concurrency=3, threads=2, draft="ngram:4")
    source = engine.scheduler.drafting.source
    for more, least in (({}, 10), ({"repetition_penalty": 1.05, "logprobs": 3}, 1)):
        params = SamplingParams(temperature=0.0, max_tokens=32, **more)
        told = []
        for drafts in (None, source):
            before = engine.stats()
            engine.scheduler.domains[0].kv.flush()
            told.append(ask(drafted_by(engine, drafts), prompts, params))
            after = engine.stats()
        assert [answer.tokens for answer in told[0]] == [answer.tokens for answer in told[1]]
        accepted = after.accepted_drafts - before.accepted_drafts
        assert least <= accepted <= after.drafted_tokens - before.drafted_tokens
        assert after.steps - before.steps < 33
