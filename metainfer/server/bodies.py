"""From bytes to a checked request object; every fault is a 400 that names the field."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec

from metainfer.core.errors import RequestError
from metainfer.server.schemas import IGNORED, INSTEAD, MESSAGE_UNSUPPORTED, UNSUPPORTED, Message

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `(key in )?\$\.?(.*)`$")
_MISSING = re.compile(r"Object missing required field `(.+?)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+?)`")
_LARGE_BYTES = 1 << 16
_MANY = 64


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; other threads run while a large one is read.

    Raises:
        RequestError: bad UTF-8, bad JSON, a duplicate key, NaN or Infinity, nesting beyond the
            parser's depth, a lone surrogate, or a value that is no object.
    """
    hooks: dict[str, Any] = {}
    if len(body) > _LARGE_BYTES:
        # The parser is one call in C. Only where it calls Python do other threads get their turn,
        # and a megabyte of numbers would hold them up for a tenth of a second.
        hooks = {"parse_int": _int, "parse_float": _float}
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant, **hooks
        )
    except UnicodeDecodeError as error:
        raise _bad_json(f"The body is not UTF-8 (byte {error.start}).") from error
    except RecursionError as error:
        raise _bad_json("The body is nested too deeply.") from error
    except ValueError as error:  # includes JSONDecodeError and integers of thousands of digits
        raise _bad_json(f"The body is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise _bad_json("The body is not a JSON object.")
    if b"\\u" in body:
        try:
            msgspec.json.encode(value)
        except UnicodeEncodeError as error:
            raise _bad_json("The body holds half of a surrogate pair.") from error
    return value


def _bad_json(cause: str) -> RequestError:
    return RequestError(cause, "Send one JSON object.", code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} appears twice in one object")
    return value


def _int(text: str) -> int:
    return int(text)


def _float(text: str) -> float:
    return float(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True)
class Rules:
    """What becomes of fields that a body's type has not: `unsupported` ones are accepted at the
    values that ask for nothing, `ignored` ones are hints. `shape` looks inside those it has."""

    unsupported: Mapping[str, tuple[object, ...]]
    ignored: Sequence[str]
    shape: Callable[[dict[str, Any]], None]


def _chat_shape(fields: dict[str, Any]) -> None:
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [_message(index, item) for index, item in enumerate(messages)]
        if len(messages) > _MANY:
            fields["messages"] = [_read(*each) for each in enumerate(fields["messages"])]


CHAT = Rules(UNSUPPORTED, IGNORED, _chat_shape)


def convert(value: dict[str, Any], kind: type[T], rules: Rules = CHAT) -> T:
    """`value` as a `kind`, after `rules` had their say.

    Raises:
        RequestError: 400 with `param` and the code ``unsupported_parameter``,
            ``unknown_parameter``, ``missing_required_parameter``, ``invalid_type`` or
            ``invalid_value``.
    """
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    fields = supported(value, known, rules.unsupported, "")
    for name in rules.ignored:
        if name not in known:
            fields.pop(name, None)
    _refuse_unknown(fields, known)
    rules.shape(fields)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error


def supported(
    value: Mapping[str, Any],
    known: Collection[str],
    unsupported: Mapping[str, tuple[object, ...]],
    where: str,
) -> dict[str, Any]:
    """`value` without the fields of `unsupported` that ask for nothing; `where` leads their names.

    Raises:
        RequestError: 400 ``unsupported_parameter`` for one that asks for something.
    """
    fields = {}
    for name, item in value.items():
        if name in known or name not in unsupported:
            fields[name] = item
        elif not _is_one_of(item, unsupported[name]):
            raise RequestError(
                f"{where}{name} is not supported.",
                INSTEAD.get(name, "Leave it out."),
                param=where + name,
                code="unsupported_parameter",
            )
    return fields


def missing(param: str) -> RequestError:
    """A field that must be there."""
    return RequestError(
        f"{param} is missing.", "Add it.", param=param, code="missing_required_parameter"
    )


def unsupported(where: str, what: object, remedy: str) -> RequestError:
    """What `where` says is known and not done here."""
    return RequestError(
        f"{where} {str(what)[:100]!r} is not supported.",
        remedy,
        param=where,
        code="unsupported_parameter",
    )


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    # 0 == False and 1 == True in Python; in JSON they differ.
    return any(type(value) is type(other) and value == other for other in neutral)


def _read(index: int, value: Any) -> Any:
    """One message of many as its type. All at once is one call, in which nobody else has a turn."""
    try:
        return msgspec.convert(value, Message)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), f"messages[{index}]") from error


_MESSAGE_FIELDS = {field.encode_name for field in msgspec.structs.fields(Message)}


def _message(index: int, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    where = f"messages[{index}]."
    fields = supported(value, _MESSAGE_FIELDS, MESSAGE_UNSUPPORTED, where)
    fields.pop("parsed", None)  # what OpenAI's clients add to an answer for their users
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = list(map(_call, fields["tool_calls"]))
    if fields.get("role") == "function":
        raise RequestError(
            f"{where}role 'function' is not supported.",
            "Use the role 'tool' with tool_call_id.",
            param=f"{where}role",
            code="unsupported_parameter",
        )
    content = fields.get("content")
    role = fields.get("role")
    may_lack = role is None or (role == "assistant" and fields.get("tool_calls"))
    if content is None and not may_lack:
        missing = "content" not in fields
        raise RequestError(
            f"{where}content is {'missing' if missing else 'null'}.",
            "Only an answer with tool_calls may lack it.",
            param=f"{where}content",
            code="missing_required_parameter" if missing else "invalid_type",
        )
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise RequestError(
                f"Content parts of type {kind!r} are not supported.",
                "Send text parts only.",
                param=f"{where}content",
                code="unsupported_parameter",
            )
    return fields


def _call(value: Any) -> Any:
    """A call without what OpenAI's clients add to it for their users."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or "parsed_arguments" not in function:
        return value
    kept = {name: item for name, item in function.items() if name != "parsed_arguments"}
    return value | {"function": kept}


def _refuse_unknown(fields: Mapping[str, Any], known: set[str]) -> None:
    for name in fields:
        if name not in known:
            raise _unknown(name, name, known)


def _unknown(name: str, param: str, known: set[str]) -> RequestError:
    near = difflib.get_close_matches(name[:64], sorted(known), n=1)
    return RequestError(
        f"Unknown parameter {param[:200]!r}.",
        f"Did you mean {near[0]!r}?" if near else "Leave it out.",
        param=param[:200],
        code="unknown_parameter",
    )


def _invalid(message: str, within: str = "") -> RequestError:
    found = _PATH.search(message)
    path = ".".join(filter(None, (within, found.group(2) if found else "")))
    text = message[: found.start()] if found else message
    lacking = _MISSING.search(text)
    if lacking:
        param = f"{path}.{lacking.group(1)}".lstrip(".")
        return missing(param)
    unknown = _UNKNOWN.search(text)
    if unknown:
        return _unknown(unknown.group(1), f"{path}.{unknown.group(1)}".lstrip("."), set())
    code = "invalid_type" if ", got `" in text else "invalid_value"
    return RequestError(f"{path or 'The body'}: {_lower(text)}.", param=path or None, code=code)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
