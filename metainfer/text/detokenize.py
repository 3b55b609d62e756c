"""Text as tokens arrive.

Whatever the split into pushes, their concatenation plus the flush equals `Tokenizer.decode` of
all ids; only the bytes of an incomplete character are held back. Cost per token is constant.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from metainfer.text.tokenizer import Tokenizer

#: A generic decoder that never yields a whole character is not waited for longer than this.
MAX_HELD_TOKENS = 64
_CONTEXT = 8


class IncrementalDetokenizer:
    """State of one stream."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True
        self._strip = tokenizer.pieces.strip_left
        self._window = _Window(tokenizer) if tokenizer.pieces.kind == "generic" else None

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        kept = self._tokenizer.visible(ids, self._skip_special)
        if self._window is not None:
            return self._window.push(kept)
        data = self._tokenizer.join(kept, at_start=self._at_start)
        self._at_start = self._at_start and not kept
        return self._stripped(self._utf8.decode(data))

    def flush(self) -> str:
        """What was held back; the stream is over."""
        if self._window is not None:
            return self._window.flush()
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text, self._strip = text[1:], self._strip - 1
        if text:
            self._strip = 0
        return text


class _Window:
    """Decode the last emitted tokens and the new ones together; what was added is the text.

    For decoders whose output for a token depends only on its neighbours (WordPiece, plain words).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._new: list[int] = []

    def push(self, ids: list[int]) -> str:
        self._new += ids
        if not self._new:
            return ""
        text = self._text()
        if not text or (text.endswith("\ufffd") and len(self._new) <= MAX_HELD_TOKENS):
            return ""
        self._before, self._new = self._new[-_CONTEXT:], []
        return text

    def flush(self) -> str:
        text = self._text() if self._new else ""
        self._before, self._new = self._new[-_CONTEXT:], []
        return text

    def _text(self) -> str:
        decode = self._tokenizer.decode
        prefix = decode(self._before, skip_special=False)
        return decode(self._before + self._new, skip_special=False)[len(prefix) :]
