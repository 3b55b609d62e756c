"""Stop strings in a stream of text.

A stop string counts at the moment its last character arrives; of several that end there the one
that began first wins. So the outcome does not depend on how the text was cut into pushes. Held
back is exactly the longest suffix that can still become a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self._prefixes = frozenset(stop[:n] for stop in self._stops for n in range(1, len(stop)))
        self._longest = max(map(len, self._stops), default=0)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text to emit, whether the stream has stopped); after a stop nothing is emitted."""
        if self.matched is not None:
            return "", True
        text = self._held + text
        found = self._first(text)
        if found is not None:
            start, stop = found
            self._held, self.matched = "", stop
            return text[: start + len(stop) if self._include else start], True
        cut = len(text) - self._possible(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back and did not become a stop string; the stream is over."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]), default=None)

    def _possible(self, text: str) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0


def _refused(what: str) -> RequestError:
    return RequestError(f"{what[0].upper()}{what[1:]}.", "Change `stop`.", param="stop")
