"""Which grammar library serves is a decision like any other: its author, its losers' reasons."""

from __future__ import annotations

import pytest

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.ledger import DecisionLedger, Origin
from metainfer.grammar.backends import KNOWN
from metainfer.planner.grammars import decide

BOTH = dict.fromkeys(KNOWN, "1.0")


@pytest.mark.parametrize(
    ("wish", "software", "chosen", "origin"),
    [
        (None, BOTH, "llguidance", Origin.DEFAULT),
        ("auto", BOTH, "llguidance", Origin.DEFAULT),
        ("xgrammar", BOTH, "xgrammar", Origin.FLAG),
        ("llguidance", BOTH, "llguidance", Origin.FLAG),
        (None, BOTH | {"llguidance": None}, "xgrammar", Origin.DEFAULT),
        (None, dict.fromkeys(KNOWN), "none", Origin.DEFAULT),
        (None, {}, "llguidance", Origin.DEFAULT),  # a machine file that does not say
        ("xgrammar", {}, "xgrammar", Origin.FLAG),
    ],
)
def test_what_is_chosen_and_by_whom(
    wish: str | None, software: dict[str, str | None], chosen: str, origin: Origin
) -> None:
    ledger = DecisionLedger()
    assert decide(wish, software, ledger, Origin.FLAG) == chosen
    decision = ledger["grammar"]
    assert (decision.value, decision.origin) == (chosen, origin)
    lost = {loser.value: loser.reasons for loser in decision.losers}
    assert set(lost) == set(KNOWN) - {chosen}
    for name, reasons in lost.items():
        said = " ".join(reason.message for reason in reasons)
        assert all(what in said for what in KNOWN[name].cannot)
        missing = any(reason.code == "not-installed" for reason in reasons)
        assert missing == (software.get(name, "") is None)
        assert any(reason.code == "not-asked" for reason in reasons) == (origin is Origin.FLAG)


def test_what_cannot_be_had_is_an_error() -> None:
    with pytest.raises(RefusedError, match="not installed") as refused:
        decide("xgrammar", BOTH | {"xgrammar": None}, DecisionLedger(), Origin.FLAG)
    assert "metainfer[xgrammar]" in str(refused.value.remedy)
    with pytest.raises(UsageError, match="'outlines'"):
        decide("outlines", BOTH, DecisionLedger(), Origin.FLAG)
