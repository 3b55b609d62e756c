"""Grammars without an engine: whatever a model draws, what it may draw spells a valid text."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemas import schemas

from metainfer.core.errors import RequestError
from metainfer.core.request import GrammarSpec
from metainfer.grammar.backend import GrammarError, Vocabulary
from metainfer.grammar.backends import opened
from metainfer.grammar.library import Library
from metainfer.grammar.llg import LLGuidance
from metainfer.grammar.rules import (
    MAX_SCHEMA_DEPTH,
    choice_regex,
    choice_spec,
    json_spec,
    regex_spec,
)
from metainfer.grammar.state import GrammarState

BYTES = [bytes([byte]) for byte in range(256)]
LONG = [b'{"', b'":', b"true", b"\xc3\xa9", b"\xf0\x9f", b'"}', b"}}}", b"aaaa", b"  \n ", b"12"]
END, OTHER_END, THINK, DONE, VOID = 266, 267, 268, 269, 270
VOCABULARY = Vocabulary(
    [*BYTES, *LONG, b"<end>", b"", b"<think>", b"</think>", b""],
    (END, OTHER_END),
    (END, OTHER_END, THINK, DONE),
)
SIZE = VOCABULARY.size
BACKEND = LLGuidance(VOCABULARY)
LIBRARY = Library(BACKEND)
LIBRARIES = {"llguidance": LIBRARY, "xgrammar": Library(opened("xgrammar", VOCABULARY))}
both = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def text_of(tokens: list[int]) -> bytes:
    return b"".join(VOCABULARY.pieces[token] for token in tokens if token < END)


def spell(state: GrammarState, rng: np.random.Generator, limit: int = 400) -> list[int] | None:
    """Draw uniformly among what is allowed until an end; None when it comes to no end."""
    drawn: list[int] = []
    for _ in range(limit):
        allowed = state.allowed(()).nonzero()[0]
        assert not state.fault, state.fault
        assert len(allowed), "nothing may follow"
        assert not {THINK, DONE, VOID} & set(allowed.tolist())
        token = int(rng.choice(allowed))
        state.accept([token])
        if token in VOCABULARY.ends:
            return drawn
        drawn.append(token)
    return None


@both
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(schema=schemas(), number=st.integers(0, 2**32 - 1))
def test_whatever_is_drawn_fits_the_schema(
    library: Library, schema: dict[str, Any], number: int
) -> None:
    spec = json_spec(schema, "schema")
    tokens = spell(library.open(spec, ()), np.random.default_rng(number))
    if tokens is None:
        return
    value = json.loads(text_of(tokens).decode("utf-8"))
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    again = library.open(spec, tokens)  # a request that was preempted
    assert (
        again.allowed(()).tolist() == library.open(spec, tokens[:-1]).allowed(tokens[-1:]).tolist()
    )


@both
def test_most_random_schemas_come_to_an_end(library: Library, seed: int) -> None:
    rng = np.random.default_rng(seed)
    schema = {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3}
    found = [spell(library.open(json_spec(schema, "s"), ()), rng) for _ in range(20)]
    assert sum(tokens is not None for tokens in found) == 20


@both
@pytest.mark.parametrize(
    "pattern", ["a+b", "é{2,3}", "[0-9]{3}-[0-9]{4}", "[a-z_]+@[^@. ]+[.]com", "(ab|c)*d"]
)
def test_a_regex_holds_for_the_whole_answer(library: Library, pattern: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    done = 0
    for _ in range(30):
        tokens = spell(library.open(regex_spec(pattern, "r"), ()), rng, 60)
        if tokens is not None:
            done += 1
            assert re.fullmatch(pattern, text_of(tokens).decode())
    assert done


CHOICES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6)


@both
@settings(max_examples=60, deadline=None, derandomize=True)
@given(choices=CHOICES, number=st.integers(0, 2**32 - 1))
def test_a_choice_is_one_of_the_texts(library: Library, choices: list[str], number: int) -> None:
    """Quotes, slashes, controls, letters with marks and pictures stand for themselves."""
    spec = choice_spec(choices, "c")
    tokens = spell(library.open(spec, ()), np.random.default_rng(number))
    assert tokens is not None and text_of(tokens).decode() in choices
    assert re.fullmatch("[0-9A-Za-z\\\\u{}|]+", choice_regex(spec.text))


@both
@settings(max_examples=40, deadline=None, derandomize=True)
@given(schema=schemas(), number=st.integers(0, 2**32 - 1), cuts=st.lists(st.integers(1, 5)))
def test_masks_ahead_are_masks_afterwards(
    library: Library, schema: dict[str, Any], number: int, cuts: list[int]
) -> None:
    """What may follow accepted drafts is what may follow the same tokens once they are drawn;
    asking ahead, along forbidden paths too, leaves no trace."""
    spec = json_spec(schema, "schema")
    rng = np.random.default_rng(number)
    path = spell(library.open(spec, ()), rng, 60) or []
    state = library.open(spec, ())
    for cut in cuts:
        ahead, path = path[:cut], path[cut:]
        state.allowed([*ahead, int(rng.integers(SIZE)), int(rng.integers(SIZE))])
        rows = [state.allowed(ahead[:n]).tolist() for n in range(len(ahead) + 1)]
        for token, row in zip(ahead, rows, strict=False):
            assert state.allowed(()).tolist() == row
            state.accept([token])
        assert state.allowed(()).tolist() == rows[-1]
        assert not state.fault


@both
def test_behind_the_end_anything_may_be_asked(library: Library) -> None:
    state = library.open(GrammarSpec("regex", "a"), ())
    a = ord("a")
    assert state.allowed([a]).nonzero()[0].tolist() == [END, OTHER_END]
    assert state.allowed([a, END, 3]).any()
    state.accept([a, END, 3])
    assert not state.fault and state.allowed([4]).any()


@both
def test_a_forbidden_token_is_a_fault(library: Library) -> None:
    state = library.open(GrammarSpec("regex", "a+"), ())
    state.accept([ord("a"), ord("b")])
    assert "forbids" in state.fault and not state.allowed(()).any()


def test_what_a_vocabulary_cannot_spell_is_a_fault_where_it_is_reached() -> None:
    """Some vocabularies lack bytes. Behind a draft it is this row's end only."""
    pieces = [b"" if piece == b"z" else piece for piece in VOCABULARY.pieces]
    library = Library(LLGuidance(Vocabulary(pieces, VOCABULARY.ends, VOCABULARY.control)))
    spec = GrammarSpec("regex", "a(zz|bb)|a+b*")
    state = library.open(GrammarSpec("regex", "azz|bb"), ())
    assert not state.allowed([ord("a")]).any() and not state.fault
    assert state.allowed([ord("b")]).nonzero()[0].tolist() == [ord("b")]
    state.accept([ord("a")])
    assert not state.allowed(()).any() and "spells" in state.fault
    other = library.open(spec, [ord("a")])
    assert other.allowed(()).any() and not other.fault


def test_what_is_forced_is_spelled_as_the_model_spells_it() -> None:
    """Other spellings of a text that must come are masked out; so the right one must be known."""
    a, x, long = ord("a"), ord("x"), len(BYTES) + LONG.index(b"aaaa")
    pieces, ends, control = VOCABULARY.pieces, VOCABULARY.ends, VOCABULARY.control
    for encode, then in (
        (None, long),  # the longest pieces
        (lambda text: list(text.encode()), a),
        (lambda text: [x, *text.encode()], long),  # one that adds to the text is not believed
        (lambda text: [99_999], long),
    ):
        library = Library(LLGuidance(Vocabulary(pieces, ends, control, encode)))
        state = library.open(GrammarSpec("regex", "(x|y)aaaa"), [x])
        assert state.allowed(()).nonzero()[0].tolist() == [then]


def test_forced_text_is_never_cut_where_bytes_are_missing() -> None:
    pieces = [b"" if piece == b"\xf2" else piece for piece in VOCABULARY.pieces]
    library = Library(LLGuidance(Vocabulary(pieces, VOCABULARY.ends, VOCABULARY.control)))
    spec = json_spec({"const": {"N\U000a276ab": 1}}, "s")
    state = library.open(spec, list(b'{"N'))
    assert not state.allowed(()).any() and "spells" in state.fault


def test_whitespace_is_free_but_not_without_end() -> None:
    spec = json_spec({"type": "object", "properties": {"a": {"type": "integer"}}}, "s")
    state = LIBRARY.open(spec, list(b'{\n\t "a" :\r\n' + b" " * 18))
    assert not state.fault
    blanks = list(b" \t\r\n")
    allowed = state.allowed(())
    assert allowed[ord("1")] and not allowed[blanks].any()
    assert LIBRARY.open(spec, list(b"{" + b" " * 19)).allowed(())[blanks].all()


def test_a_limit_behind_a_draft_is_not_the_answers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from metainfer.grammar.llg import _Matcher

    state = LIBRARY.open(GrammarSpec("regex", "a[bc]d+"), [ord("a")])
    own = _Matcher.fault.fget  # type: ignore[attr-defined]
    filled = _Matcher.fill
    hit: list[bool] = []

    def fill(self: Any, words: Any) -> None:
        filled(self, words)
        hit.append(True)

    with monkeypatch.context() as patch:
        patch.setattr(_Matcher, "fill", fill)
        patch.setattr(_Matcher, "fault", property(lambda self: "too hard" if hit else own(self)))
        assert not state.allowed([ord("b")]).any()
    assert not state.fault
    assert state.allowed(()).nonzero()[0].tolist() == [ord("b"), ord("c")]


@pytest.mark.parametrize("after", [(DONE,), tuple(b"</t>")])
def test_reasoning_is_free_and_does_not_end_the_answer(after: tuple[int, ...]) -> None:
    spec = GrammarSpec("regex", "[0-9]x", after=after)
    state = LIBRARY.open(spec, ())
    free = state.allowed(())
    assert free.sum() == SIZE - 2 and not free[[END, OTHER_END]].any()
    state.accept([*b"hm 1x <", *after[:-1]])
    assert state.allowed(()).sum() == SIZE - 2
    row = state.allowed([after[-1], ord("7")])
    assert row.nonzero()[0].tolist() == [ord("x")]
    state.accept([after[-1], ord("7")])
    assert state.allowed(()).nonzero()[0].tolist() == [ord("x")]
    again = LIBRARY.open(spec, [*b"hm 1x <", *after, ord("7")])
    assert again.allowed(()).nonzero()[0].tolist() == [ord("x")]


def test_the_model_may_open_reasoning_or_begin() -> None:
    spec = GrammarSpec("regex", "[0-9]x", after=(DONE,), opening=THINK)
    digits = list(b"0123456789")
    for start, then in (([], [*digits, THINK]), ([THINK, 5, DONE], digits), ([digits[0]], [120])):
        state = LIBRARY.open(spec, start)
        assert state.allowed(()).nonzero()[0].tolist() == then
        assert LIBRARY.open(spec, ()).allowed(start).nonzero()[0].tolist() == then
    assert LIBRARY.open(spec, [THINK]).allowed(()).sum() == SIZE - 2


REFUSED = [
    ("json", '{"type":"foo"}'),
    ("json", '{"properties":3}'),
    ("json", '{"not":{"type":"string"}}'),
    ("json", '{"$ref":"#"}'),
    ("json", '{"$ref":"http://example.org/x"}'),
    ("json", '{"enum":[]}'),
    ("json", '{"type":"string","pattern":"["}'),
    ("regex", "["),
    ("regex", "(?=a)b"),
    ("regex", "\\1"),
]


@pytest.mark.parametrize(("kind", "text"), REFUSED)
def test_the_library_says_why_in_one_line(kind: Any, text: str) -> None:
    with pytest.raises(GrammarError) as error:
        BACKEND.compile(GrammarSpec(kind, text))
    assert error.value.cause and "\n" not in error.value.cause and len(error.value.cause) <= 300


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_bounds_come_before_the_library() -> None:
    json_spec(nested(MAX_SCHEMA_DEPTH), "s")
    json_spec({"description": "x" * 5000}, "s")
    for bad in (
        nested(MAX_SCHEMA_DEPTH + 1),
        nested(5000),
        [],
        None,
        {"a": "x" * 4097},
        {"x" * 4097: 1},
        [1],
    ):
        with pytest.raises(RequestError, match="s "):
            json_spec(bad, "s")
    for make, bad in (
        (regex_spec, ""),
        (regex_spec, "a" * 8193),
        (choice_spec, []),
        (choice_spec, ["a", ""]),
        (choice_spec, ["a"] * 1025),
        (choice_spec, ["a" * 32_769]),
    ):
        with pytest.raises(RequestError) as error:
            make(bad, "s")  # type: ignore[operator]
        assert error.value.code == "invalid_schema" and error.value.status == 400


def test_grammars_stay_while_they_are_held() -> None:
    library = Library(BACKEND, kept=1)
    first, second = GrammarSpec("regex", "a"), GrammarSpec("regex", "b")
    held = library.prepare(first).result()
    library.get(second)
    assert library.find(first) is held
    del held
    assert library.find(first) is None and library.find(second) is not None
    state = library.open(first, ())
    library.get(second)
    assert library.find(first) is state.compiled
    library.close()


@both
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    ],
)
def test_a_described_name_does_not_come_back_in_disguise(
    library: Library, schema: dict[str, Any]
) -> None:
    """A name spelled with escapes would be another name to the library, and the same to readers."""
    begin = "[{" if schema["type"] == "array" else "{"
    for name in ("\\u0061", "\\u0062"):
        state = library.open(json_spec(schema, "s"), [])
        state.accept(list(f'{begin}"{name}": "x"'.encode()))
        assert "forbids" in state.fault
    state = library.open(json_spec(schema, "s"), list(f'{begin}"a": 1'.encode()))
    assert not state.fault


def test_other_names_are_still_free() -> None:
    spec = json_spec({"type": "object", "properties": {"a": {"type": "integer"}}}, "s")
    state = LIBRARY.open(spec, list('{"a": 1, "é\\n": [null]}'.encode()))
    assert not state.fault and state.allowed(())[END]


BEYOND_XGRAMMAR: list[tuple[Any, str]] = [
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "without a type"),
    ({"type": "integer", "allOf": [{"minimum": 3}]}, "allOf"),
    ({"type": "string", "minLength": 2, "pattern": "^a+$"}, "pattern"),
    ({"type": "string", "pattern": "a"}, "anchored"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "pattern"),
    ({"type": "string", "pattern": "^a$|b$"}, "inside"),
    ({"type": "string", "pattern": "^a|b$"}, "alternatives"),
    ({"type": "string", "format": "hostname"}, "hostname"),
    ({"type": "string", "maxLength": 10_000}, "4096"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "integer", "multipleOf": 3}, "multipleOf"),
    ({"type": ["string", "null"], "minLength": 2}, "several types"),
    ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": {"type": "integer"}}}, "minimum"),
    ({"$ref": "http://example.org/x"}, "definition"),
    ({"anyOf": [{"type": "null"}], "type": "object"}, "type"),
    ({"enum": [1, "a"], "type": "string"}, "type"),
    ({"enum": ["a"], "minLength": 2}, "minLength"),
    ({"type": "object", "properties": {}, "required": ["a"]}, "required"),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, "additional"),
    ({"items": {"not": {}}}, "type"),
    ({"type": "array", "items": {"not": {}}}, "type"),
    (False, "object"),
]


@pytest.mark.parametrize(("schema", "word"), BEYOND_XGRAMMAR)
def test_xgrammar_is_not_asked_for_what_it_passes_over(schema: Any, word: str) -> None:
    """It drops what it does not know, with a line in its own log at best."""
    with pytest.raises(GrammarError, match=word):
        LIBRARIES["xgrammar"].get(GrammarSpec("json", json.dumps(schema)))


@both
@pytest.mark.parametrize("kind", ["json", "regex", "choice"])
def test_no_mask_reaches_beyond_the_vocabulary(library: Library, kind: Any) -> None:
    text = {"json": '{"type":"object"}', "regex": "[^a]+", "choice": '["a"]'}[kind]
    matcher = library.get(GrammarSpec(kind, text)).start()
    words = np.zeros(-(-SIZE // 32), np.int32)
    matcher.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert bits.any() and not bits[SIZE:].any()
    assert not bits[[THINK, DONE, VOID]].any()


@both
def test_a_dot_is_no_newline(library: Library) -> None:
    state = library.open(regex_spec("a.[.]", "r"), [ord("a")])
    assert state.allowed(())[ord("b")] and not state.allowed(())[ord("\n")]
    assert state.allowed([ord("b")]).nonzero()[0].tolist() == [ord(".")]
