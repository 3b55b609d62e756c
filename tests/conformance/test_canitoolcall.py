"""canitoolcall's recorded outputs (Apache-2.0) for the families that we read.

Its pytest plug-in makes one test per recording; texts are cut where it cuts token ids. Ids of
markers are told from text, as the server does. Whitespace around calls may differ (its "soft").
"""

from __future__ import annotations

from typing import Any

import pytest

from metainfer.text.answer import AnswerParser
from metainfer.text.markup import DEEPSEEK, QWEN3, Markup, Opening
from metainfer.text.scan import substitute, symbol

WHY = "pip install canitoolcall"
chunking = pytest.importorskip("canitoolcall.chunking", reason=WHY)
checks = pytest.importorskip("canitoolcall.pytest_plugin", reason=WHY)
results = pytest.importorskip("canitoolcall.results", reason=WHY)
load_fixtures = pytest.importorskip("canitoolcall.fixtures", reason=WHY).load_fixtures

#: family -> (row, which of its models); DeepSeek's older ones write another form.
READ = {
    "deepseek": (DEEPSEEK, ("V3.2", "V4")),
    "qwen3-hermes": (QWEN3, ("",)),
}
FIXTURES = [
    fixture
    for fixture in load_fixtures(None, families=list(READ))
    if any(version in fixture.models[0] for version in READ[fixture.family][1])
]


def opening_of(fixture: Any, markup: Markup) -> Opening:
    assert markup.think is not None
    prompt = (fixture.generation_prompt or "").rstrip()
    if prompt.endswith(markup.think[0]):
        return Opening.REASONING
    return Opening.CONTENT if prompt.endswith(markup.think[1]) else Opening.EITHER


def parse(fixture: Any, pieces: list[str], symbols: dict[str, str]) -> Any:
    markup = READ[fixture.family][0]
    parser = AnswerParser(markup, opening_of(fixture, markup), symbols=symbols)
    seen = results.StreamAccumulator()
    cut = "truncated" in fixture.tags
    for answer in (*map(parser.push, pieces), parser.finish(cut=cut)):
        seen.add_reasoning(answer.reasoning)
        seen.add_content(answer.content)
        for call in answer.calls:
            seen.append_tool_call(call.name, call.arguments)
    return seen.result()


def test_there_are_recordings() -> None:
    assert len(FIXTURES) > 90
    assert {fixture.family for fixture in FIXTURES} == set(READ)


@pytest.mark.parametrize("fixture", FIXTURES, ids=[fixture.id for fixture in FIXTURES])
def test_recording(fixture: Any) -> None:
    markup = READ[fixture.family][0]
    table = {marker: symbol(place) for place, marker in enumerate(markup.markers)}
    for symbols in ({}, table):
        # A character is a unit here: finer than any tokenizer, and markers stay whole.
        units = list(substitute(fixture.raw_output, symbols))
        whole = parse(fixture, ["".join(units)], symbols)
        checks.assert_conforms(fixture, whole, soft=True)
        marks = set(symbols.values())
        for strategy in chunking.DEFAULT_STRATEGIES:
            groups = chunking.split(units, strategy, special=marks)
            streamed = parse(fixture, ["".join(group) for group in groups], symbols)
            checks.assert_equivalent(whole, streamed)
