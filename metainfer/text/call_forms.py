"""What a family's calls look like, as parts of an answer that a grammar can enforce.

One builder per form of `CallTags`, as there is one reader per form in `calls.py`: what is built
here, that reader reads back. Literals are what the models' own templates and encoders write.

Two things hold in every form. Arguments that a schema names are all there are, where it does not
itself speak of others. And a tool without a schema takes any object.

DSML has a tag per argument, for those that are named. A text stands in it as it is
(``string="true"``) where its schema only bounds its length or lists it; a text under a pattern or a
format is written as JSON (``string="false"``), as everything else is. A tool whose arguments tags
cannot spell (a choice of objects, a name with quotes) gets its arguments as one JSON body, which
the reader takes too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from metainfer.core.parts import AnyOf, Free, Json, Literal, Marker, Part, Pattern, Repeat, Seq
from metainfer.text.calls import dumps
from metainfer.text.markup import CallTags

_MAX_NAME_CHARS = 512  # of an argument; the reader bounds its tags
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_TEXT_BOUNDS = frozenset({"type", "minLength", "maxLength"})
_NO_TAG = re.compile(r'[">]|\sstring=')
_ANY_TEXT = {"type": "string"}
_NO_TEXT = {"type": ["null", "boolean", "number", "array", "object"]}
_DEFINITIONS = ("$defs", "definitions")
_OTHERS = frozenset(
    {"additionalProperties", "patternProperties", "anyOf", "allOf", "oneOf", "if", "$ref"}
)


@dataclass(frozen=True, slots=True)
class CallRule:
    """A tool that may be called. `schema`: of its arguments, an object's; None: any object."""

    name: str
    schema: Mapping[str, Any] | None = None


class CallForm(Protocol):
    """One family's calls."""

    def head(self) -> Part:
        """What may stand between reasoning and the first call."""
        ...

    def trigger(self) -> tuple[Literal | Marker, ...]:
        """Where, in free text, calls begin."""
        ...

    def calls(self, rules: Sequence[CallRule], most: int | None) -> Part:
        """What follows the trigger: one to `most` calls of `rules`, and their end."""
        ...


def form_of(tags: CallTags, ids: Mapping[str, int]) -> CallForm:
    """The builder of a family; `ids`: the markers that are one token, with their ids."""
    if tags.form == "dsml":
        return _Dsml(tags, ids)
    return _JsonCalls(tags, ids)


def only_calls(form: CallForm, rules: Sequence[CallRule], most: int | None) -> Part:
    """An answer that is one to `most` calls and nothing else."""
    return Seq((form.head(), *form.trigger(), form.calls(rules, most)))


def text_with_calls(form: CallForm, rules: Sequence[CallRule], most: int | None) -> Part:
    """An answer of free text in which a call, once begun, is one of `rules`."""
    call = Seq((Free(end=form.trigger()), form.calls(rules, most)))
    return Seq((Repeat(call, 0, 1 if most == 1 else None), Free()))


class _JsonCalls:
    """``<tool_call>\\n{"name": "f", "arguments": {..}}\\n</tool_call>``, one block a call."""

    def __init__(self, tags: CallTags, ids: Mapping[str, int]) -> None:
        self._open = Marker(tags.open, ids.get(tags.open))
        self._close = Marker(tags.close, ids.get(tags.close))

    def head(self) -> Part:
        return Repeat(Literal("\n"), 0, 2)

    def trigger(self) -> tuple[Literal | Marker, ...]:
        return (self._open,)

    def calls(self, rules: Sequence[CallRule], most: int | None) -> Part:
        bodies = [
            Seq((Literal(f'{dumps(rule.name)}, "arguments": '), Json(_closed(rule.schema))))
            for rule in rules
        ]
        body = Seq((Literal('\n{"name": '), _any_of(bodies), Literal("}\n"), self._close))
        if most == 1:
            return body
        more = None if most is None else most - 1
        return Seq((body, Repeat(Seq((Literal("\n"), self._open, body)), 0, more)))


class _Dsml:
    """``<D tool_calls>\\n<D invoke name="f">\\n<D parameter name="a" string="true">..``, one block
    of all calls."""

    def __init__(self, tags: CallTags, ids: Mapping[str, int]) -> None:
        self._token = Marker(tags.open, ids.get(tags.open))
        self._block = tags.block

    def head(self) -> Part:
        return Literal("\n\n")

    def trigger(self) -> tuple[Literal | Marker, ...]:
        return Literal("<"), self._token

    def calls(self, rules: Sequence[CallRule], most: int | None) -> Part:
        call = _any_of([self._invoke(rule) for rule in rules])
        return Seq(
            (
                Literal(f"{self._block}>\n"),
                Repeat(call, 1, most),
                *self._tag("</", f"{self._block}>"),
            )
        )

    def _tag(self, before: str, after: str) -> tuple[Part, ...]:
        return Literal(before), self._token, Literal(after)

    def _invoke(self, rule: CallRule) -> Part:
        return Seq(
            (
                *self._tag("<", f'invoke name="{rule.name}">\n'),
                self._arguments(rule.schema),
                *self._tag("</", "invoke>\n"),
            )
        )

    def _arguments(self, schema: Mapping[str, Any] | None) -> Part:
        if schema is None:
            return self._any_arguments()
        found = _properties(schema)
        if found is None:
            return Seq((Json(_closed(schema)), Literal("\n")))
        properties, required = found
        if "properties" not in schema and schema.get("additionalProperties", True) is True:
            return self._any_arguments()
        tags: list[Part] = []
        for name, value in properties.items():
            tag = self._argument(Literal(name), value, schema)
            tags.append(tag if name in required else Repeat(tag, 0, 1))
        return Seq(tuple(tags))

    def _any_arguments(self) -> Part:
        return Repeat(self._argument(Pattern("[A-Za-z0-9_.-]{1,64}"), {}, {}), 0, None)

    def _argument(self, name: Part, value: Any, root: Mapping[str, Any]) -> Part:
        forms: list[Part] = []
        for kind, item in list(_split(value, root)) or [("json", value)]:
            if kind == "json":
                body: tuple[Part, ...] = (Json(_with_definitions(item, root)), *self._tag("</", ""))
                forms.append(Seq((Literal('false">'), *body)))
            elif kind == "literal":
                forms.append(Seq((Literal(f'true">{item}</'), self._token)))
            else:
                end = (Literal("</"), self._token)
                low, high = item.get("minLength", 0), item.get("maxLength")
                forms.append(Seq((Literal('true">'), Free(low, high, end))))
        return Seq(
            (
                *self._tag("<", 'parameter name="'),
                name,
                Literal('" string="'),
                _any_of(forms),
                Literal("parameter>\n"),
            )
        )


def _any_of(parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))


def _closed(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """`schema`, an object's: no others where it names its properties and says nothing of others."""
    found = {} if schema is None else dict(schema)
    found.setdefault("type", "object")
    named, required = found.get("properties"), found.get("required", [])
    if not (isinstance(named, dict) and isinstance(required, list)) or _OTHERS & found.keys():
        return found
    if all(name in named for name in required):
        found["additionalProperties"] = False
    return found


def _properties(schema: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]] | None:
    """(properties in order, names of those that must be there), or None where tags cannot say what
    the schema says."""
    known = {"type", "properties", "required", "additionalProperties", *_DEFINITIONS, "$schema"}
    if schema.keys() - known - _NOTES or schema.get("type", "object") != "object":
        return None
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return None
    if any(_NO_TAG.search(name) or len(name) > _MAX_NAME_CHARS for name in properties):
        return None
    if not all(isinstance(name, str) and name in properties for name in required):
        return None
    if not properties and isinstance(schema.get("additionalProperties"), dict):
        return None
    return properties, frozenset(required)


def _split(value: Any, root: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a value may be: ``("text", bounds)``, ``("literal", text)``, ``("json", schema)``."""
    value = _resolved(value, root)
    if not isinstance(value, dict):
        yield "json", value
        return
    said = value.keys() - _NOTES
    if said == {"anyOf"} and isinstance(value["anyOf"], list):
        for item in value["anyOf"]:
            yield from _split(item, root)
    elif said <= {"enum", "type"} and isinstance(value.get("enum"), list):
        texts = [item for item in value["enum"] if isinstance(item, str)]
        others = [item for item in value["enum"] if not isinstance(item, str)]
        if said == {"enum", "type"} and (value["type"] != "string" or others):
            yield "json", value
            return
        yield from (("literal", text) for text in texts)
        if others:
            yield "json", {"enum": others}
    elif said <= {"const", "type"} and isinstance(value.get("const"), str):
        yield (
            ("literal", value["const"])
            if value.get("type", "string") == "string"
            else (
                "json",
                value,
            )
        )
    elif not said:
        yield "text", _ANY_TEXT
        yield "json", _NO_TEXT
    elif said <= _TEXT_BOUNDS and value.get("type") == "string" and _in_order(value):
        yield "text", value
    elif said == {"type"} and isinstance(value["type"], list) and "string" in value["type"]:
        yield "text", _ANY_TEXT
        others = [kind for kind in value["type"] if kind != "string"]
        if others:
            yield "json", {"type": others}
    else:
        yield "json", value


def _in_order(bounds: Mapping[str, Any]) -> bool:
    low, high = bounds.get("minLength", 0), bounds.get("maxLength", 2**31)
    return type(low) is int and type(high) is int and 0 <= low <= high


def _resolved(value: Any, root: Mapping[str, Any]) -> Any:
    """`value` with a reference to the root's definitions followed, where it is nothing else."""
    for _ in range(16):
        if not (isinstance(value, dict) and value.keys() - _NOTES == {"$ref"}):
            break
        _, _, path = str(value["$ref"]).partition("#/")
        where, _, name = path.partition("/")
        found = root.get(where)
        if where not in _DEFINITIONS or not isinstance(found, dict) or name not in found:
            break
        value = found[name]
    return value


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` as a root of its own, with the definitions that it may refer to."""
    if not isinstance(schema, dict):
        schema = {} if schema is True else {"not": {}}
    if "$ref" not in dumps(schema):
        return dict(schema)
    return {**schema, **{name: root[name] for name in _DEFINITIONS if name in root}}
