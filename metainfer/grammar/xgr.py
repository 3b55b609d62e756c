"""xgrammar behind `Backend`: masks prepared while a grammar is compiled, looked up while it runs.

Compiling takes tens of milliseconds over a large vocabulary, a mask then little. It imports torch
and transformers, so it is imported where a backend is built and nowhere else. It passes over what
it does not know; so every keyword and pattern is looked at here first, and refused if xgrammar
would take it for something else. Objects that describe properties have no others: it could not
keep a described name from coming again in another spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from metainfer.core.parts import AnyOf, Free, Json, Literal, Marker, Part, Pattern, Repeat, decode
from metainfer.core.request import GrammarSpec
from metainfer.grammar.backend import GrammarError, Vocabulary
from metainfer.grammar.rules import choice_regex

MAX_SPACE = 20
MAX_BOUND = 4096  # of a text's length: each character of it becomes a state

_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
     "$comment", "$schema", "$defs", "definitions"}
)  # fmt: skip
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_FORMATS = frozenset({"date", "time", "date-time", "uuid", "ipv4"})
_VALUES = ("enum", "const")
_VALUES_OF: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "null": (type(None),), "array": (list,), "object": (dict,),
}  # fmt: skip


class XGrammar:
    """The backend over one vocabulary. Building it takes a second or two: it imports torch."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self.vocabulary = vocabulary
        hidden = {*vocabulary.control, *vocabulary.ends}
        # A marker has to spell something to be drawn at all: bytes that no text holds.
        pieces = [
            b"\xff%d" % place if place in hidden else piece
            for place, piece in enumerate(vocabulary.pieces)
        ]
        info = xgrammar.TokenizerInfo(
            pieces,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.ends),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> _Compiled:
        """See `Backend.compile`."""
        try:
            return _Compiled(self._made(spec), self.vocabulary)
        except (RuntimeError, ValueError) as error:
            raise GrammarError(_one_line(str(error))) from error

    def _made(self, spec: GrammarSpec) -> Any:
        if spec.kind == "json":
            return self._compiler.compile_json_schema(
                json.dumps(told(json.loads(spec.text))),
                max_whitespace_cnt=MAX_SPACE,
            )
        if spec.kind == "parts":
            tag = {"type": "structural_tag", "format": _format(decode(spec.text))}
            return self._compiler.compile_structural_tag(json.dumps(tag))
        if spec.kind == "choice":
            return self._compiler.compile_regex(choice_regex(spec.text))
        return self._compiler.compile_regex(_dialect(spec.text))


class _Compiled:
    def __init__(self, compiled: Any, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary

    def start(self) -> _Matcher:
        import xgrammar

        return _Matcher(xgrammar.GrammarMatcher(self._compiled), self._vocabulary)


class _Matcher:
    __slots__ = ("_beyond", "_ends", "_fault", "_matcher")

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._ends = np.zeros(-(-vocabulary.size // 32), np.int32)
        for end in vocabulary.ends:
            self._ends[end // 32] |= np.int32(np.uint32(1 << end % 32).view(np.int32))
        self._beyond = vocabulary.size % 32
        self._fault = ""

    def consume(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return count
        return len(tokens)

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        if self._matcher.is_terminated():
            words[:] = self._ends
            return
        try:
            self._matcher.fill_next_token_bitmask(words[None])
        except RuntimeError as error:
            self._fault = _one_line(str(error))
            words[:] = 0
        if self._beyond:
            words[-1:].view(np.uint32)[:] &= np.uint32((1 << self._beyond) - 1)

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_completed())

    @property
    def fault(self) -> str:
        return self._fault


def _format(part: Part) -> dict[str, Any]:
    """A part as a format of xgrammar's structural tags."""
    if isinstance(part, Literal):
        return {"type": "const_string", "value": part.text}
    if isinstance(part, Marker):
        return _format(Literal(part.text)) if part.id is None else _token(part.id)
    if isinstance(part, Json):
        return {
            "type": "json_schema",
            "json_schema": told(part.schema),
            "max_whitespace_cnt": MAX_SPACE,
        }
    if isinstance(part, Pattern):
        return {"type": "regex", "pattern": _dialect(part.regex)}
    if isinstance(part, Free):
        return _free(part)
    if isinstance(part, Repeat):
        high = -1 if part.high is None else part.high
        return {"type": "repeat", "min": part.low, "max": high, "content": _format(part.part)}
    if not part.parts:
        return _format(Literal(""))
    kind = "or" if isinstance(part, AnyOf) else "sequence"
    return {"type": kind, "elements": list(map(_format, part.parts))}


def _token(token: int) -> dict[str, Any]:
    return {"type": "token", "token": token}


def _free(part: Free) -> dict[str, Any]:
    if part.end and not any(isinstance(item, Marker) and item.id is not None for item in part.end):
        raise GrammarError("xgrammar: free text before a marker that is no token of the vocabulary")
    if max(part.low, part.high or 0) > MAX_BOUND:
        raise GrammarError(f"xgrammar: a text of more than {MAX_BOUND} characters in its bounds")
    text: dict[str, Any] = {"type": "any_text"}
    if part.low or part.high is not None:
        high = "" if part.high is None else part.high
        rule = f"root ::= [\\0-\\U0010ffff]{{{part.low},{high}}}"
        text = {"type": "grammar", "grammar": rule}
    return {"type": "sequence", "elements": [text, *map(_format, part.end)]}


def told(schema: Any) -> Any:
    """`schema` as xgrammar is to be told it; it is not nested deeply.

    Raises:
        GrammarError: xgrammar would enforce something else; it names the keyword.
    """
    if schema is True:
        return True
    if not isinstance(schema, dict):
        raise GrammarError("xgrammar: a schema that is no object")
    out = {key: value for key, value in schema.items() if key not in _NOTES}
    _check_words(out)
    for key in ("properties", "$defs", "definitions"):
        if key in schema:
            out[key] = {name: told(value) for name, value in schema[key].items()}
    for key in ("anyOf", "prefixItems"):
        if key in out:
            out[key] = list(map(told, out[key]))
    for key in ("items", "additionalProperties"):
        if out.get(key, False) is not False:
            out[key] = told(out[key])
    if "minLength" in out or "maxLength" in out:  # its own bounds let control characters through
        low, high = out.pop("minLength", 0), out.pop("maxLength", "")
        out["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{low},{high}}}$'
    return out


def _check_words(schema: Mapping[str, Any]) -> None:
    said = schema.keys()
    for alone in ("$ref", "anyOf", "enum", "const"):
        if alone in said:
            _check_alone(schema, alone)
            return
    kinds = schema.get("type", list(_KEYWORDS) if not said else None)
    if kinds is None:
        raise GrammarError("xgrammar: keywords without a type")
    if isinstance(kinds, list) and said - {"type"}:
        raise GrammarError("xgrammar: keywords beside several types")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not set(kinds) <= _KEYWORDS.keys():
        raise GrammarError(f"a type of {kinds!r} is not known")
    unknown = sorted(said - {"type"} - _KEYWORDS[kinds[0]])
    if unknown:
        raise GrammarError(f"xgrammar does not enforce {unknown[0]!r}")
    if "string" in kinds:
        _check_text(schema)
    properties = schema.get("properties", {})
    if not set(schema.get("required", ())) <= properties.keys():
        raise GrammarError("xgrammar: a required property that is not described")
    if properties and schema.get("additionalProperties", False) is not False:
        raise GrammarError("xgrammar does not enforce 'additionalProperties' beside 'properties'")


def _check_alone(schema: Mapping[str, Any], keyword: str) -> None:
    beside = sorted(schema.keys() - {keyword, *(("type",) if keyword in _VALUES else ())})
    if beside:
        raise GrammarError(f"xgrammar does not enforce {beside[0]!r} beside {keyword!r}")
    if keyword == "$ref" and not re.match(r"#(/(\$defs|definitions)/|$)", str(schema["$ref"])):
        raise GrammarError("xgrammar: a reference to something else than a definition")
    if "type" in schema:
        values = schema["enum"] if keyword == "enum" else [schema["const"]]
        kinds = _VALUES_OF.get(str(schema["type"]), ())
        if not all(isinstance(value, kinds) for value in values):
            raise GrammarError(f"xgrammar does not enforce 'type' beside {keyword!r}")


def _check_text(schema: Mapping[str, Any]) -> None:
    given = [name for name in ("pattern", "format") if name in schema]
    bounds = [schema[name] for name in ("minLength", "maxLength") if name in schema]
    if len(given) + bool(bounds) > 1:
        raise GrammarError(f"xgrammar does not enforce {given[0]!r} beside other bounds of a text")
    if any(type(bound) is not int or not 0 <= bound <= MAX_BOUND for bound in bounds):
        raise GrammarError(f"xgrammar: a text whose bounds are not 0 to {MAX_BOUND} characters")
    if schema.get("format", "date") not in _FORMATS:
        raise GrammarError(f"xgrammar does not enforce the format {schema['format']!r}")
    if "pattern" in schema:
        pattern = str(schema["pattern"])
        if not (pattern.startswith("^") and pattern.endswith("$")):
            raise GrammarError("xgrammar: a pattern that is not anchored by ^ and $")
        _dialect(pattern)


_UNSAFE = re.compile(r"\\[^dntr\\.^$*+?()\[\]{}|/\-]|\(\?(?!:)")


def _dialect(pattern: str) -> str:
    """`pattern` as xgrammar reads it: a dot is no newline, anchors stand at the ends only.

    Raises:
        GrammarError: it holds what the two do not read alike.
    """
    found = _UNSAFE.search(pattern.replace("\\u{", ""))
    if found is not None:
        raise GrammarError(f"xgrammar: {found.group()!r} in a pattern")
    out, inside, place = [], False, 0
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            out.append(pattern[place : place + 2])
            place += 2
            continue
        if char == "[" and not inside:
            inside = True
        elif char == "]":
            inside = False
        elif not inside and char in "^$" and place != (0 if char == "^" else len(pattern) - 1):
            raise GrammarError(f"xgrammar: {char!r} inside a pattern")
        out.append("[^\\n]" if char == "." and not inside else char)
        place += 1
    if "|" in pattern and (pattern[0] == "^" or pattern[-1] == "$") and not _one_group(pattern):
        raise GrammarError("xgrammar: an anchor beside alternatives")
    return "".join(out)


def _one_group(pattern: str) -> bool:
    """Whether all alternatives of an anchored pattern stand in groups."""
    depth = 0
    for char in re.sub(r"\\.|\[[^\]]*\]", "", pattern):
        depth += (char == "(") - (char == ")")
        if char == "|" and not depth:
            return False
    return True


def _one_line(text: str) -> str:
    """A cause for people out of the library's message, which begins with a place in its source."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else "unknown"
    return re.sub(r"^\[[0-9:]+\] \S+:\d+: ", "", first)[:300].rstrip(".")
