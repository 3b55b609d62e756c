"""One decision of a plan document: who set it, why, and every reason of what lost."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from metainfer.core.errors import UsageError


def explained(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The decision of `key`; of a value inside one, the one that covers it; or all below it.

    Args:
        document: what ``plan --json`` prints.

    Raises:
        UsageError: nothing was decided under that name; names what sounds alike.
    """
    decided: dict[str, dict[str, Any]] = {row["key"]: row for row in document["decisions"]}
    if key in decided:
        return [decided[key]]
    below = [row for name, row in decided.items() if name.startswith((f"{key}.", f"{key}@"))]
    if below:
        return below
    part = key.rpartition(".")[0]
    while part and part not in decided:
        part = part.rpartition(".")[0]
    if part:
        return [decided[part]]
    alike = [name for name in decided if key and key in name]
    alike = alike or difflib.get_close_matches(key, decided, 5, 0.4)
    raise UsageError(
        f"no decision is called {key!r}.",
        f"Alike: {', '.join(alike[:8])}." if alike else "plan --json lists all decisions.",
        code="unknown_decision",
    )


def explain_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The decisions for people, nothing cut."""
    lines = []
    for row in found:
        lines.append(f"{row['key']} = {row['value']}")
        lines += [f"  set by: {row['origin']}", f"  why: {row['why']}"]
        for loser in row["losers"]:
            reasons = "; ".join(str(reason["message"]) for reason in loser["reasons"])
            lines.append(f"  not {loser['value']}: {reasons}")
    return lines
