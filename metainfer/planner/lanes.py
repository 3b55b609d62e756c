"""What is computed beside what inside a step: halves of a chunk in turns, the shared expert beside
the routed ones. The shared expert is where a measurement showed a gain (`benchmarks/overlap` takes
it, `gains` has it), and off elsewhere; halves are off, nothing was measured. Asked for, they are
on, or an error with every reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.ledger import DecisionLedger, Loser, Origin
from metainfer.core.plan import LayoutPlan
from metainfer.core.verdict import Reason
from metainfer.planner.drafts import MODEL
from metainfer.planner.gains import Gain, gain_of
from metainfer.planner.ranks import Cards

UNMEASURED = Reason("unmeasured", "no measurement of such a card and layout shows a gain")


def halves(layout: LayoutPlan, cards: Cards, ledger: DecisionLedger) -> int:
    """The plan's `halves`: chunks of at least so many tokens take turns by halves; 0: none.

    Raises:
        RefusedError: they were asked for, and cannot.
        UsageError: a negative number was.
    """
    against = []
    if layout.tensor == 1 and layout.expert <= 1:
        against.append(Reason("alone", "no rank waits for another inside a step"))
    if layout.prefill > 1 or layout.shards > 1:
        text = "ranks that share a chunk's rows or a cache gather entries layer by layer, in one go"
        against.append(Reason("not-built", text))
    if cards.draft.method == MODEL:
        against.append(Reason("draft", "a model that drafts reads every row of a chunk"))
    if cards.emulated is not None:
        against.append(Reason("emulated", "waits for peers that are a stand-in overlap nothing"))
    return _decide("halves", cards.intent.halves, against, cards, ledger)


def shared_beside(layout: LayoutPlan, cards: Cards, ledger: DecisionLedger) -> int:
    """The plan's `shared_beside`: steps of at most so many tokens compute the shared expert on a
    stream of its own, beside the routed ones; 0: none.

    Raises:
        RefusedError: it was asked for, and cannot.
        UsageError: a negative number was.
    """
    against = []
    if not any(spec.site.startswith("linear.shared") for spec in cards.arch.packed_weights()):
        against.append(Reason("model", "the model has no shared expert"))
    if layout.expert > layout.tensor:
        text = "domains meet at the experts: the shared one is computed beside their gathers"
        against.append(Reason("layout", text))
    gain = gain_of(cards.arch.family, cards.facts.device.capability, layout)
    return _decide("shared_beside", cards.intent.shared_beside, against, cards, ledger, gain)


def _decide(
    key: str,
    wished: int | None,
    against: Sequence[Reason],
    cards: Cards,
    ledger: DecisionLedger,
    gain: Gain | None = None,
) -> int:
    flag = f"--{key.replace('_', '-')}"
    if wished is not None and wished < 0:
        raise UsageError(f"{flag} is {wished}.", "Name a number of tokens, or 0 for never.")
    if wished and against:
        cause = f"{flag} {wished} was asked for, and this plan cannot do it."
        raise RefusedError(cause, f"Leave {flag} out.", reasons=against)
    if wished is None and gain is not None and not against:
        ledger.record(key, gain.tokens, Origin.RECORD, gain.why)
        return gain.tokens
    if wished is None:
        why, losers = (
            "nothing is computed beside something else",
            (Loser("on", (*against, UNMEASURED)),),
        )
        ledger.record(key, 0, Origin.DERIVED if against else Origin.SEED, why, losers)
        return 0
    why = "asked for" if wished else "switched off"
    ledger.record(key, wished, cards.intent.origin(key), why)
    return wished
