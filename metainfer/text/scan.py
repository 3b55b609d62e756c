"""Searching a stream for markers: what is held back, and characters that stand for tokens.

Where a tokenizer has a token for a marker, only that token is the marker; text that merely spells
it is text. Such tokens travel through the parser as Unicode noncharacters (U+FDD0 ...), which
no decoded text holds (`clean`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

_FIRST_SYMBOL = 0xFDD0
MAX_SYMBOLS = 32
_SYMBOLS = re.compile(f"[{chr(_FIRST_SYMBOL)}-{chr(_FIRST_SYMBOL + MAX_SYMBOLS - 1)}]")


def symbol(place: int) -> str:
    """The character that stands for marker token number `place`."""
    if not 0 <= place < MAX_SYMBOLS:
        raise ValueError(f"marker {place}: there are {MAX_SYMBOLS} symbols")
    return chr(_FIRST_SYMBOL + place)


def clean(text: str) -> str:
    """`text` without characters that would be taken for symbols."""
    return text if text.isascii() else _SYMBOLS.sub("\ufffd", text)


def substitute(text: str, symbols: Mapping[str, str]) -> str:
    """`text` with its markers as symbols."""
    for marker, char in symbols.items():
        text = text.replace(marker, char)
    return text


def plain(text: str, symbols: Mapping[str, str]) -> str:
    """`text` with symbols spelled out."""
    if symbols and not text.isascii() and _SYMBOLS.search(text):
        for marker, char in symbols.items():
            text = text.replace(char, marker)
    return text


class Buffer:
    """Text that was pushed and not yet consumed."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> None:
        """Append `text`."""
        self._text += text

    def peek(self) -> str:
        """All of it, left in place."""
        return self._text

    def take(self, count: int | None = None) -> str:
        """Remove and return the first `count` characters, or all."""
        count = len(self._text) if count is None else count
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def drop_space(self) -> None:
        """Remove leading whitespace."""
        self._text = self._text.lstrip()

    def until(self, needles: Sequence[str]) -> tuple[str, str | None]:
        """(text before the first needle, the needle), both consumed; without one (text that
        can no longer belong to a needle, None). No needle begins another."""
        text = self._text
        pattern, firsts = _search(tuple(needles))
        if not any(first in text for first in firsts):  # nearly always
            self._text = ""
            return text, None
        found = pattern.search(text)
        if found is not None:
            text = self.take(found.end())
            return text[: found.start()], found.group()
        return self.take(len(self._text) - self._overlap(needles)), None

    def _overlap(self, needles: Sequence[str]) -> int:
        """Length of the longest suffix that begins a needle."""
        longest = max(map(len, needles)) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(needle.startswith(tail) for needle in needles):
                return size
        return 0


@lru_cache(maxsize=64)
def _search(needles: tuple[str, ...]) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """(a pattern of all needles, the characters that they begin with)."""
    firsts = tuple(dict.fromkeys(needle[0] for needle in needles))
    return re.compile("|".join(map(re.escape, needles))), firsts
