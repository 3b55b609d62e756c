"""A refusal is data: `Verdict` holds every reason against, and none means accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something does not apply.

    `code` names the predicate (``capability``, ``shared-memory``, ``layout`` ...), `message`
    is one clause for people, `data` holds the two numbers that were compared.
    """

    code: str
    message: str
    data: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        body: dict[str, object] = {"code": self.code, "message": self.message}
        if self.data:
            body["data"] = dict(self.data)
        return body


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one or many checks; combining verdicts keeps all reasons in order."""

    reasons: tuple[Reason, ...] = ()

    @property
    def accepted(self) -> bool:
        return not self.reasons

    def __and__(self, other: Verdict) -> Verdict:
        return Verdict(self.reasons + other.reasons)

    def __bool__(self) -> bool:
        # `if verdict:` reads as "accepted" to one reader and "has reasons" to the next.
        raise TypeError("a Verdict has no truth value; ask .accepted")

    def to_json(self) -> dict[str, object]:
        return {
            "accepted": self.accepted,
            "reasons": [reason.to_json() for reason in self.reasons],
        }


ACCEPT = Verdict()


def reject(code: str, message: str, **data: object) -> Verdict:
    """A verdict with one reason."""
    return Verdict((Reason(code, message, data),))


def require(condition: bool, code: str, message: str, **data: object) -> Verdict:
    """`ACCEPT` when `condition` holds, else a rejection."""
    return ACCEPT if condition else reject(code, message, **data)


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Every reason of every verdict: blockers are listed in one pass."""
    reasons = [reason for verdict in verdicts for reason in verdict.reasons]
    return Verdict(tuple(reasons)) if reasons else ACCEPT
