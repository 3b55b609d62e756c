"""Readers of tool calls, one per form. A reader takes over at its start marker and gives back the
stream after the call; it hands out whole calls only.

Lenient where models vary and nothing is guessed: a missing outer block, a self-closing invoke, a
JSON body instead of parameters, a missing closing tag after a whole JSON object. A duplicate
parameter, arguments that are no JSON object, and calls without a name are dropped with a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from metainfer.text.scan import Buffer

MAX_CALL_CHARS = 2**20
_MAX_TAG_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Call:
    """A function's `name` and its `arguments`, the text of one JSON object."""

    name: str
    arguments: str


class CallReader(Protocol):
    """What `AnswerParser` asks of a reader."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Markers at which the reader takes over."""
        ...

    def closes(self, start: str) -> bool:
        """Whether `start` can only end a call."""
        ...

    @property
    def in_block(self) -> bool:
        """Between calls: whether the block around them is still open."""
        ...

    def begin(self, start: str) -> None:
        """`start` was consumed."""
        ...

    def step(self, buffer: Buffer) -> bool:
        """Read on; True when the stream is content again."""
        ...

    def take(self) -> list[Call]:
        """Calls that became whole."""
        ...

    def finish(self, buffer: Buffer, *, cut: bool) -> str | None:
        """The stream is over inside a call. Text to read again as content, or None."""
        ...


class _Notes:
    """Calls found so far, and stable words about the others. `repeats`: a key that comes again
    counts, as JSON readers have it."""

    in_block = False

    def __init__(self, notes: list[str], repeats: bool) -> None:
        self._notes = notes
        self._repeats = repeats
        self._calls: list[Call] = []
        self._size = 0

    def take(self) -> list[Call]:
        """Calls that became whole."""
        calls, self._calls = self._calls, []
        return calls

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def _loads(self, text: str) -> Any:
        """`loads`; with `repeats` a key that comes again is a note and no fault."""
        try:
            return loads(text)
        except ValueError:
            if not self._repeats:
                raise
        value = loads(text, repeats=True)
        self._note("duplicate_parameter")
        return value

    def _grow(self, count: int) -> bool:
        """Count `count` more characters of the call; False when it is too long to go on."""
        self._size += count
        if self._size <= MAX_CALL_CHARS:
            return True
        self._note("call_too_long")
        return False


def loads(text: str, *, repeats: bool = False) -> Any:
    """Strict JSON: no NaN or Infinity; no duplicate key, or the last of them with `repeats`.
    `ValueError` otherwise."""
    try:
        hook = None if repeats else _unique
        return json.loads(text, object_pairs_hook=hook, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def dumps(value: Any) -> str:
    """JSON as the models' own encoders write it: spaces after separators, letters as they are."""
    return json.dumps(value, ensure_ascii=False)


def _written(arguments: dict[str, Any], text: str) -> str:
    """`arguments` written again; or as they stand, the value of a member of the object `text` or
    `text` itself, where Python cannot: a number beyond its range, half a surrogate pair."""
    try:
        again = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        again.encode()
        return again
    except ValueError:
        members = {key: text[start:end] for key, start, end in _members(text)}
        return next((members[key] for key in _ARGUMENTS if key in members), text)


def _members(text: str) -> Iterator[tuple[str, int, int]]:
    """Keys of the JSON object `text`, and where their values stand."""
    decoder = json.JSONDecoder()
    end = text.index("{")
    while text[end] != "}":
        start = text.index('"', end)
        key, end = decoder.raw_decode(text, start)
        start = _MEMBER.match(text, end).end()  # type: ignore[union-attr]
        _, end = decoder.raw_decode(text, start)
        yield key, start, end
        end = _SPACE.match(text, end).end()  # type: ignore[union-attr]


_ARGUMENTS = ("arguments", "parameters")
_MEMBER, _SPACE = re.compile(r"\s*:\s*"), re.compile(r"\s*")
_NAME = re.compile(r"""\sname=(?:"([^"]*)"|'([^']*)')""")
_IS_TEXT = re.compile(r"""\sstring=["']?(true|false)""")


@dataclass(frozen=True, slots=True)
class _Tag:
    kind: str
    closing: bool
    empty: bool
    name: str
    is_text: bool


def _read_tag(text: str, closing: bool) -> _Tag:
    """A tag from what stands between the token and ``>``."""
    head = text.strip().split(None, 1)
    kind = head[0].rstrip("/") if head else ""
    named = _NAME.search(text)
    is_text = _IS_TEXT.search(text)
    name = "" if named is None else named.group(1) or named.group(2) or ""
    return _Tag(
        kind, closing, text.endswith("/"), name, is_text is None or is_text.group(1) == "true"
    )


class DsmlReader(_Notes):
    """``<D tool_calls><D invoke name=".."><D parameter name=".." string="true|false">..``.

    Reads tag by tag, so the versions' names of the outer block (``tool_calls``, ``calls``,
    ``function_calls``) and V4.1's space after the token are all understood.
    """

    def __init__(self, token: str, notes: list[str], *, repeats: bool = False) -> None:
        super().__init__(notes, repeats)
        self._open, self._close = f"<{token}", f"</{token}"
        self._value_ends = (f"</{token}parameter>", f"</{token} parameter>")
        self._closing = False
        self._reset()

    def _reset(self) -> None:
        self._name: str | None = None  # of the invoke that is open
        self._fields: dict[str, str] = {}
        self._field: tuple[str, bool] | None = None
        self._value: list[str] = []
        self._body: list[str] = []
        self._bad = ""
        self._size = 0
        self._in_tag = False

    @property
    def starts(self) -> tuple[str, ...]:
        """Opening and closing tags."""
        return self._open, self._close

    def closes(self, start: str) -> bool:
        """Whether `start` begins a closing tag."""
        return start == self._close

    def begin(self, start: str) -> None:
        """The first characters of a tag were consumed."""
        self._reset()
        self._in_tag, self._closing = True, start == self._close

    def step(self, buffer: Buffer) -> bool:
        """Read on; True after a tag outside of an invoke."""
        while True:
            if self._field is not None:
                text, end = buffer.until(self._value_ends)
                self._value.append(text)
                if not self._grow(len(text)):
                    self._abandon()
                    return True
                if end is None:
                    return False
                self._end_value()
            elif self._in_tag:
                if not self._step_tag(buffer):
                    return False
                if self._name is None:
                    return True
            else:
                text, start = buffer.until(self.starts)
                self._body.append(text)
                if not self._grow(len(text)):
                    self._abandon()
                    return True
                if start is None:
                    return False
                self._in_tag, self._closing = True, start == self._close

    def _step_tag(self, buffer: Buffer) -> bool:
        text = buffer.peek()
        end = text.find(">", 0, _MAX_TAG_CHARS)
        if end < 0:
            if len(text) < _MAX_TAG_CHARS:
                return False
            self._note("malformed_call")
            buffer.take(_MAX_TAG_CHARS)
            self._reset()
            return True
        buffer.take(end + 1)
        self._in_tag = False
        self._on_tag(_read_tag(text[:end], self._closing))
        return True

    def _on_tag(self, tag: _Tag) -> None:
        if tag.kind == "invoke":
            if tag.closing:
                self._end_call()
                return
            if self._name is not None:  # the last one was not closed
                self._bad = self._bad or "malformed_call"
                self._end_call()
            self._name = tag.name
            if not tag.name:
                self._bad = "malformed_call"
            if tag.empty:
                self._end_call()
        elif tag.kind == "parameter" and self._name is not None and not tag.closing:
            if tag.name in self._fields and self._repeats:
                self._note("duplicate_parameter")
            elif tag.name in self._fields:
                self._bad = "duplicate_parameter"
            if tag.empty:
                self._fields[tag.name] = '""'
            else:
                self._field, self._value = (tag.name, tag.is_text), []
        else:
            self.in_block = not tag.closing
            if self._name is not None:  # the block ends, and the call in it did not
                self._bad = "malformed_call"
                self._end_call()

    def _end_value(self) -> None:
        assert self._field is not None
        (name, is_text), self._field = self._field, None
        value = "".join(self._value)
        if is_text:
            self._fields[name] = dumps(value)
            return
        try:
            self._loads(value)
        except ValueError:
            self._bad = self._bad or "invalid_arguments"
        self._fields[name] = value.strip()

    def _end_call(self) -> None:
        name, bad = self._name, self._bad
        body = "".join(self._body).strip()
        if name is None:
            self._reset()
            return
        arguments = "{" + ", ".join(f"{dumps(k)}: {v}" for k, v in self._fields.items()) + "}"
        if body and not self._fields:
            try:
                bad = bad or ("" if isinstance(self._loads(body), dict) else "invalid_arguments")
                arguments = body
            except ValueError:
                bad = bad or "invalid_arguments"
        elif body:
            bad = bad or "malformed_call"
        if bad:
            self._note(bad)
        else:
            self._calls.append(Call(name, arguments))
        self._reset()

    def _abandon(self) -> None:
        self._reset()

    def finish(self, buffer: Buffer, *, cut: bool) -> str | None:
        """What was not closed is no call."""
        if self._name is not None or not cut:
            self._note("call_not_finished")
        buffer.take()
        self._reset()
        return None


_JSON_MARKS = re.compile(r'["\\{}\[\]]')


class JsonReader(_Notes):
    """``<tool_call>{"name": .., "arguments": {..}}</tool_call>``.

    The object ends where its braces do, so a marker inside a JSON string is text.
    """

    def __init__(self, start: str, close: str, notes: list[str], *, repeats: bool = False) -> None:
        super().__init__(notes, repeats)
        self._start, self._close = start, close
        self._reset()

    def _reset(self) -> None:
        self._parts: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False
        self._phase = "head"  # head, object, tail, skip
        self._size = 0

    @property
    def starts(self) -> tuple[str, ...]:
        """The opening tag, and the closing one, which is no text wherever it stands."""
        return self._start, self._close

    def closes(self, start: str) -> bool:
        """Whether `start` is the closing tag."""
        return start == self._close

    def begin(self, start: str) -> None:
        """`start` was consumed."""
        self._reset()
        if start == self._close:
            self._note("malformed_call")
            self._phase = "done"

    def step(self, buffer: Buffer) -> bool:
        """Read on; True after the closing tag, or before another opening one."""
        while self._phase != "done":
            if self._phase == "head":
                buffer.drop_space()
                head = buffer.peek()[:1]
                if not head:
                    return False
                self._phase = "object" if head == "{" else "skip"
            if self._phase == "object" and not self._read_object(buffer):
                return self._phase == "done"
            if self._phase == "tail":
                waits, marker = self._read_tail(buffer)
                if waits:
                    return False
            else:
                text, marker = buffer.until(self.starts)
                if marker is None and self._grow(len(text)):
                    return False
                self._note("malformed_call")
            self._reset()
            if marker != self._start:
                self._phase = "done"
        return True

    def _read_object(self, buffer: Buffer) -> bool:
        """Take the object's characters; True when it is whole (and `_phase` is ``tail``)."""
        text = buffer.take()
        end = self._object_end(text)
        self._parts.append(text if end < 0 else text[:end])
        if end < 0:
            if not self._grow(len(text)):
                self._phase = "done"
            return False
        buffer.push(text[end:])
        self._phase = "tail"
        self._add("".join(self._parts))
        return True

    def _read_tail(self, buffer: Buffer) -> tuple[bool, str | None]:
        """(more text is needed, the marker that stands after the object); braces too many are
        dropped, any other text is content."""
        text = buffer.peek().lstrip()
        rest = text.lstrip("}] \t\r\n")
        if rest != text:
            self._note("text_after_call")
        buffer.take()
        buffer.push(rest)
        for marker in self.starts:
            if rest.startswith(marker):
                buffer.take(len(marker))
                return False, marker
        return any(marker.startswith(rest) for marker in self.starts), None

    def _object_end(self, text: str) -> int:
        """Where the outermost brace closes, or -1; moves the scanner on."""
        place = 0
        while True:
            if self._escaped:
                if place >= len(text):
                    return -1
                self._escaped = False
                place += 1
            found = _JSON_MARKS.search(text, place)
            if found is None:
                return -1
            place, mark = found.end(), found.group()
            if self._in_string:
                self._escaped = mark == "\\"
                self._in_string = mark != '"'
            elif mark == '"':
                self._in_string = True
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place

    def _add(self, text: str) -> None:
        try:
            body = self._loads(text)
        except ValueError:
            self._note("malformed_call")
            return
        name = body.get("name")
        given = body.get("arguments", body.get("parameters", {}))
        if isinstance(given, str):  # some models encode the object once more
            text = given
            try:
                given = self._loads(given)
            except ValueError:
                given = None
        if not isinstance(name, str) or not name:
            self._note("malformed_call")
        elif not isinstance(given, dict):
            self._note("invalid_arguments")
        else:
            self._calls.append(Call(name, _written(given, text)))

    def finish(self, buffer: Buffer, *, cut: bool) -> str | None:
        """A whole object without its closing tag was a call; a broken one ends at its first
        closing tag, and what follows is read again."""
        if self._phase in ("tail", "done"):
            buffer.take()
            return None
        text = "".join(self._parts) + buffer.take()
        _, close, rest = text.partition(self._close)
        self._note("malformed_call" if close else "call_not_finished")
        self._reset()
        return rest if close else None
