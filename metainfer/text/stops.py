"""Stop strings in a stream of text.

A stop string counts at the moment its last character arrives; of several that end there the one
that began first wins. So the outcome does not depend on how the text was cut into pushes. Held
back is exactly the longest suffix that can still become a stop string.

Every stop string is an automaton (Knuth, Morris, Pratt): constant work per character, and a few
bytes per stream, because a request may ask for many streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from metainfer.core.errors import RequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 256


class StopMatcher:
    """State of one stream. `matched` is the stop string that ended it, or None."""

    def __init__(
        self,
        stops: Sequence[str],
        include_stop: bool = False,
        *,
        max_stops: int = MAX_STOPS,
        max_chars: int = MAX_STOP_CHARS,
    ) -> None:
        """`RequestError` for an empty, over-long or surplus stop string."""
        if len(stops) > max_stops:
            raise _refused(f"{len(stops)} stop strings are given, at most {max_stops} may be")
        for stop in stops:
            if not stop:
                raise _refused("a stop string is empty")
            if len(stop) > max_chars:
                raise _refused(f"a stop string has {len(stop)} characters (limit {max_chars})")
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = tuple(map(_borders, self._stops))
        self._at = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text to emit, whether the stream has stopped); after a stop nothing is emitted."""
        if self.matched is not None:
            return "", True
        begin = len(self._held)
        text = self._held + text
        for place in range(begin, len(text)):
            stop = self._step(text[place])
            if stop is not None:
                self._held, self.matched = "", stop
                end = place + 1
                return text[: end if self._include else end - len(stop)], True
        cut = len(text) - max(self._at, default=0)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back and did not become a stop string; the stream is over."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Take in one character; the longest stop string that it completes."""
        found = ""
        for number, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            at = self._at[number]
            while at and stop[at] != char:
                at = borders[at - 1]
            at += stop[at] == char
            self._at[number] = at
            if at == len(stop) and at > len(found):
                found = stop
        return found or None


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix of `stop`, the length of its longest proper prefix that also ends it."""
    found = [0] * len(stop)
    for place in range(1, len(stop)):
        at = found[place - 1]
        while at and stop[at] != stop[place]:
            at = found[at - 1]
        found[place] = at + (stop[at] == stop[place])
    return tuple(found)


def _refused(what: str) -> RequestError:
    return RequestError(f"{what[0].upper()}{what[1:]}.", "Change `stop`.", param="stop")
