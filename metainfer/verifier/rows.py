"""One row of a verification: what was compared with what, how far off it was, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from metainfer.core.digest import to_plain

PASSED, FAILED, NOT_APPLICABLE = "passed", "failed", "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`check`: the check's name. `what`: the thing compared, ``op at site`` or a text. `error` and
    `tolerance` in `unit`. `named`: what is wrong, in the words of ops' mistakes (``swiglu clamp``)
    or of the check; `where`: op, site, layer whose replacement heals it. `detail`: for people."""

    check: str
    what: str
    verdict: str = PASSED
    reference: str = ""
    candidate: str = ""
    error: float | None = None
    tolerance: float | None = None
    unit: str = ""
    named: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    detail: str = ""

    def to_json(self) -> dict[str, object]:
        found = {name: getattr(self, name) for name in self.__slots__}
        return {name: to_plain(value) for name, value in found.items()}


def bounded(error: float, tolerance: float) -> str:
    """The verdict of a measured error; NaN fails."""
    return PASSED if error <= tolerance else FAILED


def skipped(check: str, what: str, why: str) -> Row:
    return Row(check=check, what=what, verdict=NOT_APPLICABLE, detail=why)


def verdict_of(rows: Iterable[Row]) -> str:
    """Failed if any row is."""
    return FAILED if any(row.verdict == FAILED for row in rows) else PASSED


def listing(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows (as JSON) for people: one line each, with what is named below a failed one."""
    lines = []
    for row in rows:
        numbers = ""
        if row["error"] is not None and row["tolerance"] is not None:
            numbers = f"{row['error']:.3g} (at most {row['tolerance']:.3g}) {row['unit']}".rstrip()
        lines.append(f"{row['verdict']:<15}{row['check']:<14}{row['what']:<48} {numbers}".rstrip())
        if row["verdict"] == FAILED:
            lines += [f"    named: {', '.join(row['named'])}"] if row["named"] else []
            lines += [f"    at: {', '.join(row['where'])}"] if row["where"] else []
        if row["detail"]:
            lines.append(f"    {row['detail']}")
    return "\n".join(lines)
