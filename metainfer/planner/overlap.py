"""Whether a step is launched before the one ahead of it was read, and what stands against it."""

from __future__ import annotations

from collections.abc import Sequence

from metainfer.core.ledger import DecisionLedger, Loser, Origin
from metainfer.core.plan import StepGraph
from metainfer.core.verdict import Reason
from metainfer.planner.cards import Cards
from metainfer.planner.drafts import OFF


def decide(graphs: Sequence[StepGraph], cards: Cards, ledger: DecisionLedger) -> bool:
    """The plan's `overlap`: on where captured steps leave the host time beside the device."""
    against = []
    if not graphs:
        against.append(Reason("graph", "no step is captured: the host launches every op of it"))
    if cards.draft.method != OFF:
        text = "a step that verifies drafts starts where the one ahead of it turns out to end"
        against.append(Reason("draft", text))
    wished = cards.intent.overlap
    on = wished and not against
    why = "the host plans and reads beside the device" if on else "each step is read at once"
    origin = Origin.DERIVED if wished else cards.intent.origin("overlap")
    losers = (Loser("on", tuple(against)),) if against else ()
    ledger.record("overlap", on, origin, why, losers)
    return on
