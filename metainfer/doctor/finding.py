"""One finding of the doctor: what, where, how bad, how we know, what to do, what that risks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

#: For remedies that change nothing but this process.
HARMLESS = "none known"


class Severity(StrEnum):
    """`blocker`: something asked for cannot work. `slows`: it works below what the machine can.
    `information`: worth knowing, among it everything that could not be read."""

    BLOCKER = "blocker"
    SLOWS = "slows"
    INFORMATION = "information"


@dataclass(frozen=True, slots=True)
class Finding:
    """`id` is stable and scripts match on it; `where` names the exact device, file or variable.

    `evidence`: the raw line or value that it was read from. `risk`: what following the remedy may
    cost; empty where there is no remedy.
    """

    id: str
    severity: Severity
    where: str
    what: str
    remedy: str = ""
    evidence: str = ""
    risk: str = ""

    def to_json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "severity": self.severity.value,
            "where": self.where,
            "what": self.what,
            "remedy": self.remedy,
            "evidence": self.evidence,
            "risk": self.risk,
        }


def blocker(
    finding_id: str, where: str, what: str, remedy: str, evidence: str = "", risk: str = HARMLESS
) -> Finding:
    return Finding(finding_id, Severity.BLOCKER, where, what, remedy, evidence, risk)


def slows(
    finding_id: str, where: str, what: str, remedy: str, evidence: str = "", risk: str = HARMLESS
) -> Finding:
    return Finding(finding_id, Severity.SLOWS, where, what, remedy, evidence, risk)


def information(
    finding_id: str,
    where: str,
    what: str,
    remedy: str = "",
    evidence: str = "",
    risk: str = HARMLESS,
) -> Finding:
    return Finding(
        finding_id, Severity.INFORMATION, where, what, remedy, evidence, risk if remedy else ""
    )


def unknown(check: str, where: str, what: str, remedy: str = "", evidence: str = "") -> Finding:
    """What could not be read is said, and never counts as good. `evidence`: why it was not read."""
    return information(f"{check}.unknown", where, f"unknown: {what}", remedy, evidence)
