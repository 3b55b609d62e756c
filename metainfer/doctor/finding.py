"""One finding of the doctor: what, where, how bad, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """`blocker`: something asked for cannot work. `slows`: it works below what the machine can.
    `information`: worth knowing, among it everything that could not be read."""

    BLOCKER = "blocker"
    SLOWS = "slows"
    INFORMATION = "information"


@dataclass(frozen=True, slots=True)
class Finding:
    """`id` is stable and scripts match on it; `where` names the exact device, file or variable."""

    id: str
    severity: Severity
    where: str
    what: str
    remedy: str = ""

    def to_json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "severity": self.severity.value,
            "where": self.where,
            "what": self.what,
            "remedy": self.remedy,
        }


def blocker(finding_id: str, where: str, what: str, remedy: str) -> Finding:
    return Finding(finding_id, Severity.BLOCKER, where, what, remedy)


def slows(finding_id: str, where: str, what: str, remedy: str) -> Finding:
    return Finding(finding_id, Severity.SLOWS, where, what, remedy)


def information(finding_id: str, where: str, what: str, remedy: str = "") -> Finding:
    return Finding(finding_id, Severity.INFORMATION, where, what, remedy)


def unknown(check: str, where: str, what: str, remedy: str = "") -> Finding:
    """What could not be read is said, and never counts as good."""
    return Finding(f"{check}.unknown", Severity.INFORMATION, where, f"unknown: {what}", remedy)
