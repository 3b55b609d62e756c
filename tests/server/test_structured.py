"""Structured output at the server: every spelling becomes one grammar, what cannot be enforced is a
400 with the cause, and no schema holds others up."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_server import Running, call
from fake_texts import byte_qwen

from metainfer.core.errors import RequestError
from metainfer.core.request import GrammarSpec
from metainfer.engine.model_text import TextTools, byte_text
from metainfer.grammar.backend import GrammarError
from metainfer.server import structured
from metainfer.server.bodies import convert
from metainfer.server.checker import Checker
from metainfer.server.schemas import CompletionRequest
from metainfer.server.structured import grammar_of, placed
from metainfer.text.byte_text import byte_tokenizer
from metainfer.text.dialogue import JinjaFormat, Prompt
from metainfer.text.markup import Opening

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))

CHAT, LEGACY = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
JSON = GrammarSpec("json", TEXT)
OBJECT = GrammarSpec("json", '{"type":"object"}')

SPELLINGS: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, OBJECT),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        JSON,
    ),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"structured_outputs": {"json_object": False, "regex": "a"}}, GrammarSpec("regex", "a")),
    ({"structured_outputs": {"choice": ["é", "b"]}}, GrammarSpec("choice", '["é", "b"]')),
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_json": json.dumps(SCHEMA)}, JSON),
    ({"guided_regex": "a+"}, GrammarSpec("regex", "a+")),
    ({"guided_choice": ["x"]}, GrammarSpec("choice", '["x"]')),
]


@pytest.mark.parametrize(("fields", "spec"), SPELLINGS)
def test_spellings(fields: dict[str, Any], spec: GrammarSpec | None) -> None:
    found = grammar_of(convert({"model": "m", "prompt": "p", **fields}, CompletionRequest))
    assert (None if found is None else found[1]) == spec


def nested(levels: int) -> Any:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def of(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


INNER = "response_format.json_schema.schema"
BAD: list[tuple[dict[str, Any], str, str | None, str]] = [
    (of({"type": "foo"}), "invalid_schema", INNER, "foo"),
    (of({"not": {}}), "invalid_schema", INNER, "not"),
    (of({"type": "string", "pattern": "["}), "invalid_schema", INNER, "unclosed"),
    (of({"$ref": "#"}), "invalid_schema", INNER, "no text can match"),
    (of(nested(70)), "invalid_schema", INNER, "nested"),
    (of({"const": "x" * 70_000}), "invalid_schema", INNER, "characters"),
    (of({"enum": ["x" * 4097]}), "invalid_schema", INNER, "4097"),
    (of({"enum": [f"{i:0100d}" for i in range(700)]}), "invalid_schema", INNER, "characters"),
    ({"guided_regex": "(é|a)" + "x{2}" + "{2}" * 16}, "invalid_schema", "guided_regex", "20 ms"),
    (of([]), "invalid_type", INNER, ""),
    (of({"allOf": [{"type": "integer", "multipleOf": m} for m in (97, 89, 83)]}),
     "invalid_schema", INNER, "0.5 s"),
    ({"guided_json": "{"}, "invalid_schema", "guided_json", "JSON"),
    ({"guided_json": "[" * 60_000}, "invalid_schema", "guided_json", "JSON"),
    ({"guided_json": "3"}, "invalid_schema", "guided_json", "schema"),
    ({"guided_regex": "["}, "invalid_schema", "guided_regex", "unclosed"),
    ({"guided_regex": "(?=a)b"}, "invalid_schema", "guided_regex", "look"),
    ({"guided_regex": ""}, "invalid_schema", "guided_regex", "characters"),
    ({"guided_regex": "x" * 50 + "{2}" * 100}, "invalid_schema", "guided_regex", ""),
    ({"guided_choice": []}, "invalid_schema", "guided_choice", "0 texts"),
    ({"guided_choice": [""]}, "invalid_schema", "guided_choice", "empty"),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "invalid_value", None, "one grammar"),
    ({"structured_outputs": {"grammar": "x"}}, "unknown_parameter", "structured_outputs.grammar",
     ""),
    ({"guided_regex": "a", "ignore_eos": True}, "invalid_value", "ignore_eos", "end"),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, LEGACY])
@pytest.mark.parametrize(("fields", "code", "param", "word"), BAD)
def test_what_cannot_be_enforced_is_refused(
    server: Running, path: str, fields: dict[str, Any], code: str, param: str | None, word: str
) -> None:
    prompt: dict[str, Any] = {"prompt": "say:x"}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "say:x"}]}
    answer = call(server.port, "POST", path, {"model": "fake", **prompt, **fields})
    assert answer.status == 400, answer.raw
    error = answer.json["error"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert word in error["message"] and "\n" not in error["message"]
    assert param is None or error["param"] == param


def test_a_good_one_is_served(server: Running) -> None:
    for fields, spec in SPELLINGS:
        body = {"model": "fake", "prompt": "say:x", **fields}
        answer = call(server.port, "POST", LEGACY, body)
        assert answer.status == 200, (spec, answer.raw)


def test_a_hostile_grammar_holds_nobody_up(server: Running) -> None:
    """While checks burn their half second each, other requests go through as always."""
    hostile = [
        of({"allOf": [{"type": "integer", "multipleOf": m} for m in (97, 89, 80 + i)]})
        for i in range(4)
    ]

    def send(fields: dict[str, Any], statuses: list[int]) -> None:
        body = {"model": "fake", "prompt": "say:x", **fields}
        statuses.append(call(server.port, "POST", LEGACY, body).status)

    def others_meanwhile() -> int:
        """Requests that were answered beside."""
        statuses: list[int] = []
        threads = [threading.Thread(target=send, args=(fields, statuses)) for fields in hostile]
        for thread in threads:
            thread.start()
        done = 0
        while any(thread.is_alive() for thread in threads):
            assert call(server.port, "GET", "/health/live").status == 200
            done += 1
        assert len(statuses) == 4 and set(statuses) <= {400, 429} and 400 in statuses
        return done

    # A server that a check blocks answers one or two between any two of the four. A busy machine
    # may answer few as well, so one good round will do.
    assert any(others_meanwhile() > 10 for _ in range(10))


def test_the_checker_survives_what_it_checks() -> None:
    checker = Checker("llguidance")
    bomb = json.dumps({"allOf": [{"type": "integer", "multipleOf": m} for m in (97, 89, 83)]})
    checker.check(GrammarSpec("regex", "a"))
    assert checker._child is not None
    first = checker._child.pid
    with pytest.raises(GrammarError, match="more than"):
        checker.check(GrammarSpec("json", bomb))
    checker.check(GrammarSpec("regex", "b"))
    assert checker._child.pid != first
    with pytest.raises(GrammarError, match="unclosed"):
        checker.check(GrammarSpec("regex", "["))
    checker.check(GrammarSpec("choice", '["a"]'))
    checker.close()


def test_without_the_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'metainfer\[grammar\]'") as error:
        structured.require("llguidance")
    assert error.value.status == 400


def test_the_grammar_begins_behind_reasoning() -> None:
    qwen, plain = byte_qwen(320), byte_text(320)
    spec = GrammarSpec("regex", "a")
    think, done = (qwen.tokenizer.token_id(tag) for tag in ("<think>", "</think>"))
    assert think is not None and done is not None
    for opening, after, first in (
        (Opening.CONTENT, (), None),
        (Opening.REASONING, (done,), None),
        (Opening.EITHER, (done,), think),
    ):
        found = placed(spec, qwen, Prompt([1], opening))
        assert (found.after, found.opening) == (after, first)
        assert placed(spec, plain, Prompt([1], opening)) == spec
    assert placed(spec, qwen, None) == spec


def test_markers_that_are_no_tokens() -> None:
    """A byte vocabulary spells the marker in one way; with merges there is none to wait for."""
    qwen = byte_qwen(320)
    tokenizer = byte_tokenizer(320)
    spelled = TextTools(tokenizer, JinjaFormat(tokenizer, qwen.format.template))  # type: ignore[attr-defined]
    spec = GrammarSpec("regex", "a")
    found = placed(spec, spelled, Prompt([1], Opening.REASONING))
    assert bytes(found.after) == b"</think>"
    assert placed(spec, spelled, Prompt([1], Opening.EITHER)) == spec
