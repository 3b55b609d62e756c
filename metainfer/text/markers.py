"""Marker tokens of a family in one tokenizer, and detokenisation that lets them through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from metainfer.text.detokenize import IncrementalDetokenizer
from metainfer.text.markup import Markup
from metainfer.text.scan import clean, symbol
from metainfer.text.tokenizer import Tokenizer


class MarkerTokens:
    """Which markers of `markup` are one token in `tokenizer`; the others are known by their text.

    A special token counts, and so does an ordinary added one: vocabularies differ in that flag.
    """

    def __init__(self, markup: Markup, tokenizer: Tokenizer) -> None:
        self.symbols: Mapping[str, str] = {}
        self.by_id: Mapping[int, str] = {}
        symbols, by_id = {}, {}
        for place, marker in enumerate(markup.markers):
            token = tokenizer.token_id(marker)
            if token is not None:
                symbols[marker] = by_id[token] = symbol(place)
        self.symbols, self.by_id = symbols, by_id


class MarkedDetokenizer:
    """`IncrementalDetokenizer` that writes marker tokens as their symbols (see `scan`)."""

    def __init__(self, tokenizer: Tokenizer, markers: MarkerTokens) -> None:
        self._inner = IncrementalDetokenizer(tokenizer)
        self._symbols = markers.by_id

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; a marker completes whatever stood before it."""
        if self._symbols.keys().isdisjoint(ids):
            return clean(self._inner.push(ids))
        parts: list[str] = []
        run: list[int] = []
        for token in ids:
            found = self._symbols.get(token)
            if found is None:
                run.append(token)
                continue
            parts.append(clean(self._inner.push(run) + self._inner.flush()))
            parts.append(found)
            run = []
        if run:
            parts.append(clean(self._inner.push(run)))
        return "".join(parts)

    def flush(self) -> str:
        """What was held back; the stream is over."""
        return clean(self._inner.flush())
