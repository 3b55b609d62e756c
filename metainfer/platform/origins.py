"""Where a fact came from, in one vocabulary, so that a guess never looks like a reading.

An origin is ``kind: detail``. A fact whose value is ``None`` is unknown, whatever was tried;
the origin then says what was asked in vain.
"""

from __future__ import annotations

from collections.abc import Mapping

PROBED = "probed"  # read off this machine
MEASURED = "measured"  # timed on this machine
VENDOR = "vendor"  # data sheet
FIELD = "field"  # reported by others
DERIVED = "derived"  # follows from other facts by a stated rule
SEED = "seed"  # a labelled guess until something better replaces it
UNKNOWN = "unknown"  # nobody who was asked knows; stands beside None only

KINDS = frozenset({PROBED, MEASURED, VENDOR, FIELD, DERIVED, SEED, UNKNOWN})


def origin(kind: str, detail: str) -> str:
    """``kind: detail``; `kind` is one of `KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"unknown origin kind {kind!r}")
    return f"{kind}: {detail}"


class Origins:
    """Collects origins by dotted path while a probe fills in facts."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}

    def note(self, path: str, kind: str, detail: str) -> None:
        self._entries[path] = origin(kind, detail)

    def merge(self, entries: Mapping[str, str], prefix: str = "") -> None:
        """Take over entries of a sub-probe; `prefix` ends in a dot when given."""
        for path, text in entries.items():
            self._entries[prefix + path] = text

    def freeze(self) -> dict[str, str]:
        return dict(sorted(self._entries.items()))
