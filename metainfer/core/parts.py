"""What an answer may look like, as data: the parts of which a family's calls are made.

Written by `text` for a family (`call_forms`), sent to the engine as JSON inside a `GrammarSpec`,
read by the grammar backends, each of which says the same in its own language.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec


class Literal(msgspec.Struct, frozen=True, tag="text"):
    """Exactly `text`."""

    text: str


class Marker(msgspec.Struct, frozen=True, omit_defaults=True, tag="marker"):
    """A marker of the family: the one token `id`, or `text` where the vocabulary has no such
    token."""

    text: str
    id: int | None = None


class Json(msgspec.Struct, frozen=True, tag="json"):
    """One JSON text that is valid under `schema`."""

    schema: dict[str, Any]


class Pattern(msgspec.Struct, frozen=True, tag="pattern"):
    """A text that `regex` matches as a whole."""

    regex: str


class Free(msgspec.Struct, frozen=True, omit_defaults=True, tag="free"):
    """`low` to `high` characters of any text without markers, then `end`, which it does not hold;
    without an `end` it goes on to the end of the answer."""

    low: int = 0
    high: int | None = None
    end: tuple[Union[Literal, Marker], ...] = ()  # noqa: UP007 (msgspec reads it at run time)


class Seq(msgspec.Struct, frozen=True, tag="seq"):
    """One part after the other."""

    parts: tuple[Part, ...]


class AnyOf(msgspec.Struct, frozen=True, tag="any"):
    """One of the parts."""

    parts: tuple[Part, ...]


class Repeat(msgspec.Struct, frozen=True, omit_defaults=True, tag="repeat"):
    """`part`, `low` to `high` times; without end where `high` is None."""

    part: Part
    low: int = 0
    high: int | None = None


Part = Union[Literal, Marker, Json, Pattern, Free, Seq, AnyOf, Repeat]  # noqa: UP007

_encoder = msgspec.json.Encoder()


def encode(part: Part) -> str:
    """The text of a ``parts`` grammar."""
    return _encoder.encode(part).decode()


def decode(text: str) -> Part:
    """`encode` undone."""
    return msgspec.json.decode(text, type=Part)
