"""Which prompts of a pair of layouts are computed as decodes are.

A chunk whose rows ranks share is launched op by op, for who borrows what is told by the host. One
that is shorter than its own launches (`graphs.launch_bound`) ends sooner as a captured step of the
decode layout, whose weights and caches are the same; it takes running decodes along. Requests move
nothing when they cross the border: a chunk and a decode after it keep their entries alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.ledger import DecisionLedger, Loser, Origin
from metainfer.core.plan import LayoutPlan, StepGraph
from metainfer.core.verdict import Reason
from metainfer.planner.cards import Cards
from metainfer.planner.graphs import border

KEY, FLAG = "prefill_from", "--prefill-from"


def prefill_from(
    layout: LayoutPlan, captured: Sequence[StepGraph], cards: Cards, ledger: DecisionLedger
) -> int:
    """The plan's `prefill_from`: as asked for, else as far as chunks of decodes are captured.

    Raises:
        RefusedError: it was asked for, and there is nothing to decide.
        UsageError: a negative number was.
    """
    asked, against = cards.intent.prefill_from, []
    if layout.prefill == 1:
        text = "chunks are computed as decodes are: no other layout shares their rows"
        against.append(Reason("layout", text))
    if layout.shards > 1:
        text = "decodes of ranks that share a cache compute no prompts"
        against.append(Reason("not-built", text))
    if asked is not None and asked < 0:
        raise UsageError(f"{FLAG} is {asked}.", "Name a number of tokens, or 0 for none.")
    if asked and against:
        cause = f"{FLAG} {asked} was asked for, and this plan has no such chunks."
        raise RefusedError(cause, f"Leave {FLAG} out.", reasons=against)
    if asked is not None:
        ledger.record(KEY, asked, cards.intent.origin(KEY), "asked for")
        return asked
    found = 0 if against else border(captured)
    if found:
        why = "shorter chunks are captured as decodes compute them, and end before their launches"
        ledger.record(KEY, found, Origin.SEED, why)
        return found
    against = against or [Reason("graph", "no chunk is captured as decodes would compute it")]
    losers = (Loser("on", tuple(against)),)
    ledger.record(KEY, 0, Origin.DERIVED, "every chunk is computed as its layout says", losers)
    return 0
