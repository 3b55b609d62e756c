"""llguidance behind `Backend`: JSON schemas, patterns, choices and tool calls as token masks.

Its parser is lazy: compiling is milliseconds, each mask is computed when it is asked for. Fuel
limits bound both, so that no schema or pattern holds a step up; hitting one ends that answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from metainfer.core.parts import AnyOf, Free, Json, Literal, Marker, Part, Pattern, Repeat, decode
from metainfer.core.request import GrammarSpec
from metainfer.grammar.backend import DEAD_END, GrammarError, Vocabulary
from metainfer.grammar.rules import choice_regex, literal_regex

#: Spaces between the parts of a JSON text: free, but not without end, or a model could stay there.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"

SHORT_CHARS, KNOWN_TEXTS = 64, 4096
"""Spellings of short forced texts are kept: quotes, braces and names of keys come again."""

_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 100_000,  # about 7 ms
    "step_max_items": 50_000,  # about 3 ms
    "max_lexer_states": 50_000,  # 1 to 2 KB each
    "max_grammar_size": 200_000,
    "max_items_in_row": 10_000,
    "verbose_errors": False,
}


class LLGuidance:
    """The backend over one vocabulary. Building it takes 0.1 s for 50,000 tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        self.vocabulary = vocabulary
        ends = list(vocabulary.ends)
        wrapper: Any = _Wrapper(vocabulary)
        self._tokenizer = LLTokenizer(wrapper, vocabulary.size, ends)
        self._limits = LLParserLimits(**_LIMITS)

    def compile(self, spec: GrammarSpec) -> _Compiled:
        """See `Backend.compile`."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, _grammar(spec), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(_one_line(matcher.get_error()))
        matcher.compute_bitmask()  # the first mask builds the lexer's start, and may hit a limit
        if matcher.is_error():
            raise GrammarError(_one_line(matcher.get_error()))
        return _Compiled(matcher)


class _Wrapper:
    """A vocabulary in the form that llguidance reads. It asks for the encoding of forced text, and
    masks out other spellings of it: what a model would not write by itself."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.pieces)
        self.special_token_ids = sorted({*vocabulary.control, *vocabulary.ends})
        self.eos_token_id = vocabulary.ends[0]
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True
        self._encode = vocabulary.encode
        self._known: dict[str, list[int]] = {}
        hidden = set(self.special_token_ids)
        self._ids = {p: i for i, p in enumerate(self.tokens) if p and i not in hidden}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Ids that spell exactly `text`, or as far as the vocabulary goes and then an end."""
        found = self._known.get(text)
        if found is None:
            found = self._spell(text)
            if len(text) <= SHORT_CHARS:
                if len(self._known) >= KNOWN_TEXTS:
                    self._known.clear()
                self._known[text] = found
        return found

    def _spell(self, text: str) -> list[int]:
        wanted = text.encode()
        if self._encode is not None:
            ids = list(self._encode(text))
            if b"".join(self.tokens[i] if i < len(self.tokens) else b"" for i in ids) == wanted:
                return ids
        return self._greedy(wanted)

    def _greedy(self, text: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                # What is returned is believed: an end where none may be is found by `state`.
                return [*ids, self.eos_token_id]
            ids.append(self._ids[text[at:end]])
            at = end
        return ids


class _Compiled:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> _Matcher:
        return _Matcher(self._matcher.deep_copy())


class _Matcher:
    __slots__ = ("_matcher",)

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def consume(self, tokens: Sequence[int]) -> int:
        count: int = self._matcher.try_consume_tokens(list(tokens))
        return count

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def fault(self) -> str:
        if not self._matcher.is_error():
            return ""
        text: str = self._matcher.get_error()
        return DEAD_END if text.startswith("NoExtension") else _one_line(text)


def _grammar(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    try:
        if spec.kind == "json":
            options: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
            schema = json.dumps(_told(json.loads(spec.text)))
            grammar: str = LLMatcher.grammar_from_json_schema(schema, overrides=options)
        elif spec.kind == "parts":
            grammar = _Lark().of(decode(spec.text))
        else:
            pattern = spec.text if spec.kind == "regex" else choice_regex(spec.text)
            grammar = LLMatcher.grammar_from_regex(pattern)
    except ValueError as error:
        raise GrammarError(_one_line(str(error))) from error
    return grammar


_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_ONES = ("items", "additionalProperties")


def _told(schema: Any) -> Any:
    """`schema` as llguidance is to be told it; it is not nested deeply.

    An object that says nothing of other properties may have any. Left at that, a model could spell
    a described name with escapes and give it any value; keys under a pattern have one spelling.
    """
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for word in _MAPS:
        if isinstance(out.get(word), dict):
            out[word] = {name: _told(value) for name, value in out[word].items()}
    for word in _LISTS:
        if isinstance(out.get(word), list):
            out[word] = list(map(_told, out[word]))
    for word in _ONES:
        if word in out:
            out[word] = _told(out[word])
    free = out.get("additionalProperties", True) is True and "patternProperties" not in out
    if out.get("properties") and free:
        out |= {"patternProperties": {"^": True}, "additionalProperties": False}
    return out


class _Lark:
    """Parts of an answer in llguidance's dialect of Lark.

    Its lexer never goes back: text up to an end is one lexeme with it. Where the end is spelled,
    the lexeme is lazy and stops at the first; where it is a token, text cannot run into it.
    """

    def __init__(self) -> None:
        self._frees: dict[str, str] = {}  # rule -> name

    def of(self, part: Part) -> str:
        """The whole grammar."""
        start = self._part(part)
        rules = (f"{name}{rule}" for rule, name in self._frees.items())
        return "\n".join(["%llguidance {}", *rules, f"start: {start}"])

    def _part(self, part: Part) -> str:
        if isinstance(part, Literal):
            return json.dumps(part.text)
        if isinstance(part, Marker):
            return json.dumps(part.text) if part.id is None else f"<[{part.id}]>"
        if isinstance(part, Json):
            space = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
            return "%json " + json.dumps({**_told(part.schema), "x-guidance": space})
        if isinstance(part, Pattern):
            return f"/{_slashes(part.regex)}/"
        if isinstance(part, Free):
            return self._free(part)
        if isinstance(part, Repeat):
            high = "" if part.high is None else str(part.high)
            return f"({self._part(part.part)}){{{part.low},{high}}}"
        joint = " | " if isinstance(part, AnyOf) else " "
        return f"({joint.join(map(self._part, part.parts))})" if part.parts else '""'

    def _free(self, part: Free) -> str:
        high = "" if part.high is None else str(part.high)
        tokens = [item for item in part.end if isinstance(item, Marker) and item.id is not None]
        spelled = "".join(item.text for item in part.end if item not in tokens)
        lazy = "[lazy]" if spelled and not tokens else ""
        rule = f"{lazy}: /(?s:.{{{part.low},{high}}}){''.join(map(literal_regex, spelled))}/"
        name = self._frees.setdefault(rule, f"free_{len(self._frees)}")
        return " ".join([name, *map(self._part, tokens)])


def _slashes(regex: str) -> str:
    """`regex` between slashes: those that are not escaped are, and it stays on one line."""
    found = re.compile(r"(\\.)|(/)|(\n)", re.DOTALL)
    return found.sub(lambda m: m[1] or ("\\/" if m[2] else "\\n"), regex)


def _one_line(text: str) -> str:
    """A cause for people out of the library's message, which may span lines and quote sources."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("error: ")), "")
    first = lines[0] if lines else "unknown"
    if first.startswith("NoExtension"):
        return "no text can match it"
    return (f"{first} {reason}" if reason else first)[:300].rstrip(".")
