"""The decision ledger: every value that was decided, who decided it, why, and what lost.

`doctor`, `plan` and the start-up screen are renderings of this one list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from metainfer.core.errors import InternalError
from metainfer.core.verdict import Reason


class Origin(StrEnum):
    """Who set a value. A user's word always wins over ours."""

    FLAG = "flag"
    ENV = "env"
    FILE = "file"
    REQUEST = "request"
    CHECKPOINT = "checkpoint"
    RECORD = "record"  # measured on this machine, or on such a card by a shipped record
    PROBE = "probe"  # read off this machine
    COST_MODEL = "cost model"
    SEED = "seed"  # a labelled guess until a record replaces it
    DEFAULT = "default"
    DERIVED = "derived"  # follows from other decisions


@dataclass(frozen=True, slots=True)
class Loser:
    """An alternative that was not taken, with all its reasons."""

    value: str
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, object]:
        return {"value": self.value, "reasons": [reason.to_json() for reason in self.reasons]}


@dataclass(frozen=True, slots=True)
class Decision:
    """One decided value. `key` is a dotted path (``limits.max_running``)."""

    key: str
    value: object
    origin: Origin
    why: str
    losers: tuple[Loser, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "key": self.key,
            "value": self.value,
            "origin": self.origin.value,
            "why": self.why,
            "losers": [loser.to_json() for loser in self.losers],
        }


@dataclass(slots=True)
class DecisionLedger:
    """Append-only while resolving; a key is decided once."""

    _decisions: dict[str, Decision] = field(default_factory=dict)

    def record(
        self,
        key: str,
        value: object,
        origin: Origin,
        why: str,
        losers: tuple[Loser, ...] = (),
    ) -> None:
        """Write down one decision. Deciding the same key twice is a bug of ours."""
        if key in self._decisions:
            raise InternalError(f"decision {key!r} was taken twice")
        self._decisions[key] = Decision(key, value, origin, why, losers)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._decisions.values())

    def __getitem__(self, key: str) -> Decision:
        return self._decisions[key]

    def __contains__(self, key: str) -> bool:
        return key in self._decisions

    def freeze(self) -> tuple[Decision, ...]:
        return tuple(self._decisions.values())
