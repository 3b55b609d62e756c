"""Enforced calls without an engine: whatever a model draws, its parser reads valid calls back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemas import objects, schemas

from metainfer.core import parts
from metainfer.core.request import GrammarSpec
from metainfer.grammar.backend import GrammarError, Vocabulary
from metainfer.grammar.backends import KNOWN, opened
from metainfer.grammar.library import Library
from metainfer.grammar.state import GrammarState
from metainfer.text.answer import AnswerParser
from metainfer.text.call_forms import CallRule, form_of, only_calls, text_with_calls
from metainfer.text.calls import Call
from metainfer.text.markup import DEEPSEEK, QWEN3, Markup, Opening
from metainfer.text.scan import symbol

LONG = [b'": ', b'">', b"</", b"true", b"\xc3\xa9", b"}}", b"\n\n", b'name="', b"<tool", b"  "]
END, FIRST_MARK = 256 + len(LONG), 257 + len(LONG)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "｜DSML｜")
PIECES = [*(bytes([byte]) for byte in range(256)), *LONG, b"<end>", *map(str.encode, MARKS)]
CONTROL = tuple(range(END, len(PIECES)))
ENDING = [*b'"</}]>', PIECES.index(b"</"), *CONTROL]
VOCABULARY = Vocabulary(PIECES, (END,), CONTROL)
LIBRARIES = {name: Library(opened(name, VOCABULARY)) for name in KNOWN}


@dataclass
class Read:
    calls: list[Call] = field(default_factory=list)
    content: str = ""
    notes: list[str] = field(default_factory=list)


class Family:
    """One row over one library; its markers are tokens, or `spelled`."""

    def __init__(
        self, markup: Markup, library: str = "llguidance", *, spelled: bool = False
    ) -> None:
        assert markup.calls is not None
        self.markup = markup
        self.library = LIBRARIES[library]
        self.ids = {} if spelled else {m: FIRST_MARK + i for i, m in enumerate(MARKS)}
        self.symbols = {m: symbol(i) for i, m in enumerate(self.ids)}
        self.form = form_of(markup.calls, self.ids)

    def open(self, part: parts.Part) -> GrammarState:
        return self.library.open(GrammarSpec("parts", parts.encode(part)), ())

    def draw(self, part: parts.Part, number: int, limit: int = 600) -> tuple[list[int], bool]:
        """Ids up to the end, at random among those that are allowed, often those by which something
        ends; whether the end came."""
        rng = np.random.default_rng(number)
        state = self.open(part)
        drawn: list[int] = []
        while len(drawn) < limit:
            allowed = state.allowed(()).nonzero()[0]
            assert not state.fault, state.fault
            assert len(allowed)
            ending = np.intersect1d(allowed, ENDING)
            token = int(rng.choice(ending if len(ending) and rng.random() < 0.4 else allowed))
            state.accept([token])
            if token == END:
                return drawn, True
            drawn.append(token)
        return drawn, False

    def spell(self, *run: str | int) -> list[int]:
        """Ids of texts and of markers between them."""
        return [i for part in run for i in (part.encode() if isinstance(part, str) else [part])]

    def read(self, drawn: list[int], *, cut: bool = False) -> Read:
        """What the server reads."""
        table = dict(zip(self.ids.values(), self.symbols.values(), strict=True))
        text, run = "", b""
        for token in drawn:
            if token in table:
                text, run = text + run.decode() + table[token], b""
            else:
                run += PIECES[token]
        text += run.decode(errors="strict" if not cut else "replace")
        parser = AnswerParser(self.markup, Opening.CONTENT, calls="enforced", symbols=self.symbols)
        answers = [parser.push(text), parser.finish(cut=cut)]
        return Read(
            [call for answer in answers for call in answer.calls],
            "".join(answer.content for answer in answers),
            parser.notes,
        )


FAMILIES = {
    "dsml": Family(DEEPSEEK),
    "hermes": Family(QWEN3),
    "hermes, spelled": Family(QWEN3, spelled=True),
    "dsml, xgrammar": Family(DEEPSEEK, "xgrammar"),
    "hermes, xgrammar": Family(QWEN3, "xgrammar"),
}
XGRAMMAR = LIBRARIES["xgrammar"]
BEYOND_XGRAMMAR = ("a choice of objects", "a required name that nobody described")
every = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@st.composite
def tools(draw: st.DrawFn) -> list[CallRule]:
    """One to three tools as people write them: open, closed, with nothing, with definitions."""
    rules = []
    for name in ("f", "foo", "get-it.2")[: draw(st.integers(1, 3))]:
        schema = dict(draw(objects(schemas())))
        if draw(st.booleans()):
            del schema["additionalProperties"]
        if schema["properties"] and draw(st.booleans()):
            first = next(iter(schema["properties"]))
            schema["$defs"] = {"it": schema["properties"][first], "text": {"type": "string"}}
            schema["properties"] = {**schema["properties"], first: {"$ref": "#/$defs/it"}}
            schema["properties"]["more"] = {
                "type": "array", "items": {"$ref": "#/$defs/text"}, "maxItems": 1
            }  # fmt: skip
        rules.append(CallRule(name, schema))
    return rules


def check(calls: list[Call], rules: list[CallRule]) -> None:
    by_name = {rule.name: rule.schema for rule in rules}
    for call in calls:
        value = json.loads(call.arguments)
        assert isinstance(value, dict)
        jsonschema.validate(value, by_name[call.name] or {}, jsonschema.Draft202012Validator)


@every
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(rules=tools(), most=st.sampled_from([None, 1]), number=st.integers(0, 2**32 - 1))
def test_whatever_is_drawn_is_a_valid_call(
    family: Family, rules: list[CallRule], most: int | None, number: int
) -> None:
    drawn, ended = family.draw(only_calls(family.form, rules, most), number)
    if not ended:
        got = family.read(drawn, cut=True)
        assert got.calls or "call_not_finished" in got.notes
        check(got.calls, rules)
        return
    got = family.read(drawn)
    assert got.calls and not got.content and not got.notes
    assert most is None or len(got.calls) == 1
    check(got.calls, rules)


@every
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(rules=tools(), number=st.integers(0, 2**32 - 1), word=st.text(max_size=5))
def test_text_is_free_until_a_call_begins(
    family: Family, rules: list[CallRule], number: int, word: str
) -> None:
    part = text_with_calls(family.form, rules, None)
    state = family.open(part)
    trigger = [mark.id if getattr(mark, "id", None) is not None else mark.text
               for mark in family.form.trigger()]  # fmt: skip
    before = [*word.encode(), *b" Well "]
    state.accept([*before, *family.spell(*trigger)])
    assert not state.fault and not state.allowed(())[END]
    rest, _ = family.draw(only_calls(family.form, rules, 1), number)
    begin = len(rest) - len(family.spell(*trigger))
    whole = family.read(rest)
    assert family.open(part).allowed(())[END]
    # The same calls, with text before and after them.
    again = family.open(part)
    ids = [*before, *rest, *b"bye"]
    again.accept(ids)
    assert not again.fault and again.allowed(())[END] and begin > 0
    got = family.read(ids)
    assert got.calls == whole.calls and got.content.startswith(word.strip("\n")[:1])
    check(got.calls, rules)


WAYS: dict[str, tuple[Any, Any]] = {
    "any object": (None, {"a": "x<y", "b-2": [1, {"c": None}], "d": "true"}),
    "no arguments": ({"type": "object", "properties": {}}, {}),
    "a text of its length": (
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 2, "maxLength": 3}}},
        {"a": "é,"},
    ),
    "listed": ({"properties": {"a": {"enum": ["x</", 'y"', 3, None]}}}, {"a": 'y"'}),
    "a text or nothing": (
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, "required": ["a"]},
        {"a": "null"},
    ),
    "nothing or a text": ({"properties": {"a": {"type": ["string", "null"]}}}, {"a": None}),
    "a pattern": ({"properties": {"a": {"type": "string", "pattern": "^a+$"}}}, {"a": "aa"}),
    "anything": ({"properties": {"a": {}}}, {"a": {"b": ["</"]}}),
    "a choice of objects": (
        {"anyOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}]}, {"a": 3},
    ),
    "a name that no tag can hold": ({"properties": {'a">b': {"type": "integer"}}}, {'a">b': 3}),
    "a definition": (
        {"$defs": {"t": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/t"}}},
        {"a": "x"},
    ),
    "a recursive one": (
        {
            "$defs": {"t": {"type": "object", "properties": {"u": {"$ref": "#/$defs/t"}}}},
            "properties": {"a": {"$ref": "#/$defs/t"}},
        },
        {"a": {"u": {"u": {}}}},
    ),
    "a required name that nobody described": (
        {"properties": {"a": {"type": "integer"}}, "required": ["b"]}, {"a": 1, "b": "x"},
    ),
    "values of one kind": ({"additionalProperties": {"type": "integer"}}, {"a": 1, "b": 2}),
}  # fmt: skip


def written(family: Family, arguments: dict[str, Any], body: bool) -> list[int]:
    """One call of `f` as the family's models write it, `body`: DSML with a JSON body."""
    if family.markup is QWEN3:
        inner = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
        marks = [family.ids.get(mark, mark) for mark in ("<tool_call>", "</tool_call>")]
        return family.spell(marks[0], f"\n{inner}\n", marks[1])
    d = family.ids["｜DSML｜"]
    run: list[str | int] = ["\n\n<", d, "tool_calls>\n<", d, 'invoke name="f">\n']
    if body:
        run.append(json.dumps(arguments, ensure_ascii=False) + "\n")
    for name, value in {} if body else arguments.items():
        text = isinstance(value, str) and value != "aa"
        shown = value if text else json.dumps(value, ensure_ascii=False)
        run += ["<", d, f'parameter name="{name}" string="{str(text).lower()}">', shown]
        run += ["</", d, "parameter>\n"]
    return family.spell(*run, "</", d, "invoke>\n</", d, "tool_calls>")


@every
@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_writes_by_itself_is_allowed(family: Family, way: str) -> None:
    """The form is that of the family's own templates, tag by tag, and is read back as it was."""
    schema, arguments = WAYS[way]
    body = way in (
        "a choice of objects",
        "a name that no tag can hold",
        "a required name that nobody described",
        "values of one kind",
    )
    ids = written(family, arguments, body)
    part = only_calls(family.form, [CallRule("f", schema)], 1)
    if family.library is XGRAMMAR and way in BEYOND_XGRAMMAR:
        with pytest.raises(GrammarError, match="xgrammar"):
            family.open(part)
        return
    state = family.open(part)
    state.accept(ids)
    assert not state.fault and state.allowed(()).nonzero()[0].tolist() == [END]
    (made,) = family.read(ids).calls
    assert (made.name, json.loads(made.arguments)) == ("f", arguments)


@every
@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, {"a": "x"}),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 1, "more": 2}),  # nobody named it
        ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, {"a": 1}),
        ({"properties": {"a": {"type": "string", "maxLength": 2}}}, {"a": "abc"}),
        ({"properties": {"a": {"enum": ["x", "y"]}}}, {"a": "xy"}),
        ({"properties": {"a": {"type": "string", "pattern": "^a+$"}}}, {"a": "b"}),
        ({"type": "object", "properties": {}}, {"a": 1}),
    ],
)
def test_what_no_schema_allows_is_not_drawn(
    family: Family, schema: dict[str, Any], arguments: dict[str, Any]
) -> None:
    state = family.open(only_calls(family.form, [CallRule("f", schema)], 1))
    state.accept(written(family, arguments, body=False))
    assert "forbids" in state.fault


@every
def test_how_many_calls_and_which(family: Family) -> None:
    rules = [CallRule("f", {"properties": {}}), CallRule("g", {"properties": {}})]
    one = written(family, {}, body=False)
    for most, more in ((1, False), (None, True)):
        part = only_calls(family.form, rules, most)
        seen = {family.read(family.draw(part, i)[0]).calls[0].name for i in range(8)}
        assert seen == {"f", "g"}
        counts = {len(family.read(family.draw(part, i)[0]).calls) for i in range(8)}
        assert (max(counts) > 1) is more and min(counts) == 1
    for text in ("hi", "\n\n\n\nhi"):
        state = family.open(only_calls(family.form, rules, None))
        state.accept(list(text.encode()))
        assert "forbids" in state.fault
    state = family.open(only_calls(family.form, rules, None))
    assert not state.allowed(())[END]
    state.accept(one)
    assert not state.fault


@every
def test_masks_ahead_are_masks_afterwards_in_calls(family: Family, seed: int) -> None:
    """Drafts ask further on; what they were told is what is found there, and leaves no trace."""
    part = text_with_calls(family.form, [CallRule("f", WAYS["anything"][0])], None)
    ids = [*b"Hm. ", *written(family, {"a": [1, "x"]}, body=False), *b" Done"]
    state = family.open(part)
    while ids:
        ahead, ids = ids[:7], ids[7:]
        state.allowed([*ahead[:3], FIRST_MARK, 0, 1])
        rows = [state.allowed(ahead[:n]).tolist() for n in range(len(ahead) + 1)]
        for token, row in zip(ahead, rows, strict=False):
            assert state.allowed(()).tolist() == row
            state.accept([token])
        assert state.allowed(()).tolist() == rows[-1] and not state.fault


@every
def test_what_cannot_be_enforced_is_refused(family: Family) -> None:
    for schema in ({"properties": {"a": {"not": {}}}}, {"properties": {"a": "x"}}):
        part = only_calls(family.form, [CallRule("f", schema)], None)
        with pytest.raises(GrammarError):
            family.library.get(GrammarSpec("parts", parts.encode(part)))


def test_free_text_before_a_spelled_marker_is_llguidances_alone() -> None:
    spelled = Family(QWEN3, "xgrammar", spelled=True)
    spelled.open(only_calls(spelled.form, [CallRule("f", None)], None))
    with pytest.raises(GrammarError, match="no token of the vocabulary"):
        spelled.open(text_with_calls(spelled.form, [CallRule("f", None)], None))
