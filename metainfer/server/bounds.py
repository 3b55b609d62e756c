"""Bounds of a request: one table with defaults, set by ``--limit NAME=N``, shown in OpenAPI.

The types in `schemas` hold the ceilings, beyond which nothing can be configured; this is the second
look, with what the operator chose.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metainfer.core.errors import RequestError, UsageError
from metainfer.grammar import rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One bound. `field`: where it holds in a body. `keyword`: the word of JSON Schema that says
    it, for `field` itself or, with `items`, for each of its items; empty where none does."""

    name: str
    default: int
    ceiling: int
    text: str
    field: str
    keyword: str = ""
    items: bool = False


BOUNDS: tuple[Bound, ...] = (
    Bound(
        name="messages",
        default=4096,
        ceiling=65_536,
        text="messages of a conversation",
        field="messages",
        keyword="maxItems",
    ),
    Bound(
        name="tools",
        default=128,
        ceiling=4096,
        text="tools of a request",
        field="tools",
        keyword="maxItems",
    ),
    Bound(
        name="stop",
        default=16,
        ceiling=256,
        text="stop strings",
        field="stop",
        keyword="maxItems",
    ),
    Bound(
        name="stop_chars",
        default=256,
        ceiling=4096,
        text="characters of one stop string",
        field="stop",
        keyword="maxLength",
        items=True,
    ),
    Bound(
        name="n",
        default=16,
        ceiling=256,
        text="answers to one prompt",
        field="n",
        keyword="maximum",
    ),
    Bound(
        name="answer_tokens",
        default=1 << 22,
        ceiling=1 << 40,
        text="tokens that one request may ask for: prompts x n x max_tokens",
        field="max_tokens",
    ),
    Bound(
        name="top_logprobs",
        default=20,
        ceiling=20,
        text="alternatives reported for a token",
        field="top_logprobs",
        keyword="maximum",
    ),
    Bound(
        name="logit_bias",
        default=1024,
        ceiling=65_536,
        text="tokens with a bias",
        field="logit_bias",
        keyword="maxProperties",
    ),
    Bound(
        name="cache_salt",
        default=128,
        ceiling=1024,
        text="characters of a cache salt",
        field="cache_salt",
        keyword="maxLength",
    ),
    Bound(
        name="regex_chars",
        default=rules.MAX_REGEX_CHARS,
        ceiling=rules.MAX_REGEX_CHARS,
        text="characters of a regular expression",
        field="guided_regex",
        keyword="maxLength",
    ),
    Bound(
        name="schema_chars",
        default=rules.MAX_SCHEMA_CHARS,
        ceiling=rules.MAX_SCHEMA_CHARS,
        text="characters of a JSON schema",
        field="guided_json",
    ),
    Bound(
        name="schema_depth",
        default=rules.MAX_SCHEMA_DEPTH,
        ceiling=rules.MAX_SCHEMA_DEPTH,
        text="levels of a JSON schema",
        field="guided_json",
    ),
)

_BY_NAME = {bound.name: bound for bound in BOUNDS}


class Bounds(Mapping[str, int]):
    """The bounds in force, by name."""

    def __init__(self, chosen: Mapping[str, int] | None = None) -> None:
        """Raises `UsageError` for a bound that is not there or out of its own range."""
        self._values = {bound.name: bound.default for bound in BOUNDS}
        for name, value in (chosen or {}).items():
            bound = _BY_NAME.get(name)
            if bound is None:
                near = difflib.get_close_matches(name, _BY_NAME, n=1)
                raise UsageError(
                    f"--limit names {name!r}.",
                    f"Did you mean {near[0]}?" if near else f"There are {', '.join(_BY_NAME)}.",
                )
            if not 0 <= value <= bound.ceiling:
                raise UsageError(
                    f"--limit {name}={value} is out of range.", f"It may be 0 to {bound.ceiling}."
                )
            self._values[name] = value

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def check_counts(self, value: Mapping[str, Any]) -> None:
        """Refuse lists that are too long before anything is made of their items. As `check`."""
        for name in ("messages", "tools"):
            items = value.get(name)
            if isinstance(items, list):
                self._refuse(name, len(items), name)

    def check(self, body: Any) -> None:
        """Refuse a converted body that exceeds one of them.

        Raises:
            RequestError: 400 ``invalid_value``, `param` names the field.
        """
        for bound in BOUNDS:
            if bound.keyword and (value := getattr(body, bound.field, None)) is not None:
                self._measure(bound, value)
        outputs = getattr(body, "structured_outputs", None)
        if outputs is not None and outputs.regex is not None:
            self._refuse("regex_chars", len(outputs.regex), "structured_outputs.regex")
        self._check_schemas(body)

    def _measure(self, bound: Bound, value: Any) -> None:
        if bound.name == "stop":
            value = value if isinstance(value, list) else ()
        elif bound.items:
            value = max([value] if isinstance(value, str) else value, key=len, default="")
        self._refuse(bound.name, value if isinstance(value, int) else len(value), bound.field)

    def check_total(self, tokens: int) -> None:
        """Refuse more generated tokens than one request may ask for in all."""
        self._refuse("answer_tokens", tokens, "max_tokens")

    def _refuse(self, name: str, value: int, param: str) -> None:
        most = self._values[name]
        if value > most:
            raise RequestError(
                f"{param}: {_BY_NAME[name].text}: {value} are given, at most {most} may be.",
                "Send less.",
                param=param,
                code="invalid_value",
            )

    def _check_schemas(self, body: Any) -> None:
        """Only where the operator chose less than what `grammar.rules` holds anyway."""
        chars, depth = self._values["schema_chars"], self._values["schema_depth"]
        if (chars, depth) == (rules.MAX_SCHEMA_CHARS, rules.MAX_SCHEMA_DEPTH):
            return
        for name, schema in _schemas(body):
            text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
            self._refuse("schema_chars", len(text), name)
            self._refuse("schema_depth", _depth(schema), name)

    def document(self, body: int, headers: int) -> dict[str, Any]:
        """All bounds for the OpenAPI document."""
        own = {
            bound.name: {"limit": self._values[bound.name], "of": bound.text, "in": bound.field}
            for bound in BOUNDS
        }
        return {
            "body": {"limit": body, "of": "bytes of a body", "in": None},
            "headers": {"limit": headers, "of": "headers of a request", "in": None},
            **own,
        }

    def narrow(self, properties: Mapping[str, Any]) -> None:
        """Write the bounds into the properties of a body's JSON schema."""
        for bound in BOUNDS:
            for field in (bound.field, _ELSEWHERE.get(bound.field, bound.field)):
                if bound.keyword and field in properties:
                    for option in _options(properties[field], bound):
                        option[bound.keyword] = self._values[bound.name]


#: what dialects call a field of the chat request
_ELSEWHERE = {"messages": "input", "stop": "stop_sequences"}
_TYPES = {
    "maxItems": "array",
    "maxLength": "string",
    "maximum": "integer",
    "maxProperties": "object",
}


def _options(described: Mapping[str, Any], bound: Bound) -> Iterator[dict[str, Any]]:
    for option in described.get("anyOf", [described]):
        if option.get("type") == _TYPES[bound.keyword]:
            yield option
        if bound.items and option.get("type") == "array":
            yield option["items"]


def _schemas(body: Any) -> Iterator[tuple[str, Any]]:
    form = getattr(body, "response_format", None)
    if form is not None and form.json_schema is not None and form.json_schema.schema is not None:
        yield "response_format.json_schema.schema", form.json_schema.schema
    outputs = getattr(body, "structured_outputs", None)
    for name, value in (
        ("structured_outputs.json", getattr(outputs, "json", None)),
        ("guided_json", getattr(body, "guided_json", None)),
    ):
        if isinstance(value, dict):
            yield name, value
    for index, tool in enumerate(getattr(body, "tools", None) or ()):
        schema = getattr(tool, "function", {}).get("parameters")
        if schema is not None:
            yield f"tools[{index}].function.parameters", schema


def _depth(value: object) -> int:
    """Levels of `value`; a scalar has none."""
    found, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        found += 1
        level = [inner for item in level for inner in _inner(item)]
    return found


def _inner(item: dict[str, object] | list[object]) -> Sequence[object]:
    return list(item.values()) if isinstance(item, dict) else item
