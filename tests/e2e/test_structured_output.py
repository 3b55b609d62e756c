"""Structured output through the engine: valid under any schema, the same with and without drafts,
unmoved by preemption, ended when complete. The model is random and knows no JSON."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from harness import Answer, ask, start, take
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from speculation import DEEPEST, Mixed, drafted_by, same

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))

from schemas import schemas

from metainfer.core.errors import RequestError
from metainfer.core.request import FinishReason, GrammarSpec, Request, SamplingParams
from metainfer.core.step import RequestOutput
from metainfer.engine.engine import Engine
from metainfer.engine.grammars import GrammarDesk
from metainfer.grammar.backend import GrammarError
from metainfer.grammar.rules import choice_spec, json_spec, regex_spec

MODEL = "random:tiny-llama"
EOS = (0,)
PROMPT = list(b"Answer: ")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["é", "日本", "😀"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = start(
        MODEL, dtype="float64", prefix_cache=False, draft=f"ngram:{DEEPEST}", concurrency=8
    )
    yield engine
    engine.close()


def params_of(spec: GrammarSpec, **more: Any) -> SamplingParams:
    given = {"temperature": 1.0, "seed": 1, "max_tokens": 300, "grammar": spec, **more}
    return SamplingParams(**given)


def text_of(answer: Answer) -> str:
    # A byte each; ids above 255 spell themselves.
    parts = [bytes([t]) if t < 256 else f"<{t}>".encode() for t in answer.tokens]
    return b"".join(parts).decode("utf-8")


@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(found=st.lists(schemas(), min_size=12, max_size=12), number=st.integers(0, 2**31))
def test_answers_fit_their_schemas(
    engine: Engine, found: list[dict[str, Any]], number: int
) -> None:
    drafted_by(engine, None)
    temperatures = [0.0, 0.7, 1.0, 2.0]
    params = [
        params_of(json_spec(schema, "s"), seed=number + i, temperature=temperatures[i % 4])
        for i, schema in enumerate(found)
    ]
    answers = ask(engine, [PROMPT] * len(found), params, eos=EOS)
    ended = 0
    for schema, answer in zip(found, answers, strict=True):
        assert answer.finish in (FinishReason.STOP, FinishReason.LENGTH), answer.error
        if answer.finish is FinishReason.STOP:
            ended += 1
            value = json.loads(text_of(answer))
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    assert ended >= len(found) // 2


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_b23_a_real_grammar_under_drafts(engine: Engine, temperature: float, seed: int) -> None:
    specs = [json_spec(PERSON, "s"), regex_spec("(é|ab|c[0-9]){9,12}!", "s"), None]
    params = [
        SamplingParams(temperature=temperature, seed=7, max_tokens=60, grammar=spec)
        for spec in specs
    ]
    prompts = [PROMPT, [9, 8, 7], [100, 200]]
    plain = ask(drafted_by(engine, None), prompts, params, eos=EOS)
    drafts = Mixed(random.Random(seed), 320, 0.75)
    drafts.most = DEEPEST
    for prompt, each, answer in zip(prompts, params, plain, strict=True):
        drafts.learn(prompt, each, answer.tokens)
    before = engine.stats()
    drafted = ask(drafted_by(engine, drafts), prompts, params, eos=EOS)
    after = engine.stats()
    for answer, wanted in zip(drafted, plain, strict=True):
        same(answer, wanted)
    assert after.accepted_drafts > before.accepted_drafts
    assert after.drafted_tokens - before.drafted_tokens > (
        after.accepted_drafts - before.accepted_drafts
    )


def test_limits_and_ends(engine: Engine) -> None:
    """`max_tokens` cuts, `min_tokens` waits where something else may follow, and no longer."""
    drafted_by(engine, None)
    cut = params_of(json_spec(PERSON, "s"), max_tokens=5)
    short = params_of(choice_spec(["yes"], "s"), min_tokens=50)
    long = params_of(regex_spec("a*", "s"), min_tokens=20, max_tokens=25, temperature=0.0)
    answers = ask(engine, [PROMPT] * 3, [cut, short, long], eos=EOS)
    assert answers[0].finish is FinishReason.LENGTH and len(answers[0].tokens) == 5
    assert answers[1].finish is FinishReason.STOP and text_of(answers[1]) == "yes"
    assert 20 <= len(answers[2].tokens) <= 25 and set(text_of(answers[2])) == {"a"}


def test_preemption_keeps_the_place(seed: int) -> None:
    """Too few pages for all: some are preempted inside their JSON and go on as if nothing was."""
    prompts = [[seed % 200 + i, *range(40)] for i in range(4)]
    params = [params_of(json_spec(PERSON, "s"), seed=i, max_tokens=60) for i in range(4)]
    roomy = start(MODEL, dtype="float64", prefix_cache=False, concurrency=4)
    wanted = ask(roomy, prompts, params, eos=EOS)
    assert roomy.stats().preemptions == 0
    size = roomy.resolved.plan.kv_tokens if roomy.resolved else 0
    per_token = roomy.held_bytes["kv"] / size
    roomy.close()
    tight = start(
        MODEL, dtype="float64", prefix_cache=False, concurrency=4, context=256,
        kv_bytes=int(per_token * 288),
    )  # fmt: skip
    found = ask(tight, prompts, params, eos=EOS)
    assert tight.stats().preemptions > 0
    tight.close()
    assert [a.tokens for a in found] == [a.tokens for a in wanted]


def test_reasoning_comes_first(engine: Engine) -> None:
    """Anything may be thought, but not for ever: the answer follows the marker."""
    drafted_by(engine, None)
    after = (55,)
    spec = GrammarSpec("choice", '["yes","no"]', after=after)
    bias = {token: -100.0 for token in range(320) if token not in (55, 66, *b"yesno")}
    params = [
        params_of(spec, seed=i, max_tokens=200, logit_bias=bias, temperature=2.0) for i in range(4)
    ]
    for answer in ask(engine, [PROMPT] * 4, params, eos=EOS):
        assert answer.finish is FinishReason.STOP
        at = answer.tokens.index(55)
        assert bytes(answer.tokens[at + 1 :]) in (b"yes", b"no")


def test_the_loop_goes_on_while_a_grammar_is_compiled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted_by(engine, None)
    library = engine._desk._library
    assert library is not None
    gate, compiling = threading.Event(), library._backend.compile

    def slow(spec: GrammarSpec) -> Any:
        gate.wait(3600)
        if "bad" in spec.text:
            raise GrammarError("no such thing")
        return compiling(spec)

    monkeypatch.setattr(library._backend, "compile", slow)
    answers = {name: Answer() for name in ("free", "held", "bad", "gone")}
    for name, text in (("held", "x{3}"), ("bad", "bad"), ("gone", "y")):
        engine.submit(Request(name, (5,), params_of(GrammarSpec("regex", text)), EOS))
    engine.submit(Request("free", (5,), SamplingParams(max_tokens=20, temperature=0.0)))
    assert engine.stats().waiting == 4
    while answers["free"].finish is None:
        for output in engine.step()[0]:
            take(answers[output.request_id], output)
    assert engine.has_work and engine.stats().waiting == 3
    (gone,) = engine.cancel(["gone"])
    assert gone.finish is FinishReason.CANCELLED and gone.request_id == "gone"
    engine.step()  # waits for no grammar
    gate.set()
    while engine.has_work:
        for output in engine.step()[0]:
            take(answers[output.request_id], output)
    assert text_of(answers["held"]) == "xxx" and answers["held"].finish is FinishReason.STOP
    assert answers["bad"].finish is FinishReason.ERROR
    assert "no such thing" in answers["bad"].error
    assert answers["gone"].finish is None
    assert not engine._desk._held
    engine.scheduler.audit()


def test_what_cannot_be_had_is_refused(engine: Engine) -> None:
    spec = GrammarSpec("regex", "a")
    with pytest.raises(RequestError) as error:
        engine.submit(Request("x", (5,), params_of(spec, ignore_eos=True), EOS))
    assert error.value.param == "ignore_eos"
    with pytest.raises(RequestError, match="No such library"):
        GrammarDesk(None, "No such library.").hold(Request("x", (5,), params_of(spec), EOS))
    assert not engine.has_work


def test_a_grammar_that_runs_into_a_limit_ends_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metainfer.grammar.llg import _Matcher

    drafted_by(engine, None)
    monkeypatch.setattr(_Matcher, "fault", property(lambda self: "too hard"))
    params = [params_of(regex_spec("a{9}", "s")), SamplingParams(max_tokens=5)]
    bad, good = ask(engine, [PROMPT] * 2, params, eos=EOS)
    assert bad.finish is FinishReason.ERROR and "too hard" in bad.error
    assert len(good.tokens) == 5 and good.finish is FinishReason.LENGTH


def test_a_reasoning_model_answers_in_form_behind_its_reasoning() -> None:
    """DeepSeek-V4's prompt opens reasoning; what the client gets as content fits."""
    from metainfer.engine.model_text import load_text
    from metainfer.server.structured import placed
    from metainfer.text.dialogue import Conversation, Turn

    reference = "random:tiny-deepseek-v4"
    engine = start(reference, concurrency=4, context=256)
    assert engine.resolved is not None
    text = load_text(reference, engine.resolved.arch.vocab_size)
    done = text.tokenizer.token_id("</think>")
    assert done is not None
    wish = choice_spec(["ja", "nein </think> é"], "s")
    for thinking in (True, False):
        turns = (Turn("user", ("Hm?",)),)
        prompt = text.format.encode(Conversation(turns=turns, thinking=thinking))
        spec = placed(wish, text, prompt)
        assert spec.after == ((done,) if thinking else ())
        # The marker is likely enough to come, and forbidden inside the answer all the same.
        params = [params_of(spec, seed=i, max_tokens=150, logit_bias={done: 6.0}) for i in range(3)]
        eos = text.tokenizer.eos_ids
        answers = ask(engine, [prompt.ids] * 3, params, eos=eos)
        for each, answer in zip(params, answers, strict=True):
            assert answer.finish is FinishReason.STOP, answer
            stream = text.answer_stream([], each, prompt, calls="text")
            last = RequestOutput(
                "r", tuple(answer.tokens), finish=FinishReason.STOP, stop_token=eos[0]
            )
            delta = stream.push(last)
            assert delta.text in ("ja", "nein </think> é")
            assert thinking or not delta.reasoning
    engine.close()
