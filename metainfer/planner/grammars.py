"""Which grammar library serves: the one that expresses more, unless someone says otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.ledger import DecisionLedger, Loser, Origin
from metainfer.core.verdict import Reason
from metainfer.grammar.backends import KNOWN, NONE

AUTO = "auto"


def decide(
    wish: str | None, software: Mapping[str, str | None], ledger: DecisionLedger, origin: Origin
) -> str:
    """The library's name, or ``none``, on the record with what every other one cannot.

    `software`: package -> version, None where it is not installed; one that is not named may be.

    Raises:
        UsageError: no such library.
        RefusedError: the library that was asked for is not installed.
    """
    if wish is not None and wish != AUTO and wish not in KNOWN:
        raise UsageError(
            f"grammar backend {wish!r} is not known.",
            f"Use --grammar-backend {AUTO}, {' or '.join(KNOWN)}.",
        )
    missing = [name for name in KNOWN if software.get(name, "") is None]
    if wish in missing:
        raise RefusedError(
            f"the grammar backend {wish} is not installed.",
            f"Install it: pip install 'metainfer[{KNOWN[wish].extra}]', or leave "
            "--grammar-backend out.",
            code="grammar_backend_missing",
        )
    asked = wish if wish in KNOWN else None
    chosen = asked or next((name for name in KNOWN if name not in missing), NONE)
    losers = tuple(Loser(name, _reasons(name, missing, asked)) for name in KNOWN if name != chosen)
    why = "asked for" if asked else "the first that is installed" if chosen != NONE else (
        "no library is installed: structured output and enforced calls are refused"
    )  # fmt: skip
    ledger.record("grammar", chosen, origin if asked else Origin.DEFAULT, why, losers)
    return chosen


def _reasons(name: str, missing: list[str], asked: str | None) -> tuple[Reason, ...]:
    reasons = [Reason("expression", f"it cannot express {what}") for what in KNOWN[name].cannot]
    if name in missing:
        reasons.insert(0, Reason("not-installed", f"the package {name} is not installed"))
    if asked is not None:
        reasons.insert(0, Reason("not-asked", f"{asked} was asked for"))
    return tuple(reasons)
