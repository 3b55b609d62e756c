"""What domains send to experts that they share: rows as they are, or rounded first.

Kernels that round their rows before the first product take them rounded, to the same bits, so a
rank may round its own and send half the bytes. That costs a launch and longer routing weights.
"""

from __future__ import annotations

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import DecisionLedger, Loser, Origin
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason
from metainfer.kernels.choice import Choice, Selection

LEAST = 64
"""Rows of a rank from which on half of their bytes is more than a launch: two ranks through host
memory need about 5 us for 64 rows of 4,096 channels, by `comm.model`; a seed."""
EXPERTS, KEY = "moe_experts", "rounded_from"


def rounded_from(
    layout: LayoutPlan, intent: Intent, selection: Selection, ledger: DecisionLedger
) -> int:
    """The plan's `rounded_from`: rows of a rank from which on they are rounded before they are sent
    to the experts, in phases whose kernel takes them so; 0: never.

    Raises:
        RefusedError: it was asked for, and no rank sends rows, or every kernel takes them as they
            are.
        UsageError: a negative number was.
    """
    asked = intent.rounded_from
    if asked is not None and asked < 0:
        raise UsageError(f"--rounded-from is {asked}.", "Name a number of tokens, or 0 for never.")
    found = _experts(selection)
    sends = layout.expert > 1 and (layout.expert > layout.tensor or layout.prefill > 1)
    losers = tuple(
        Loser(f"rounded@{each.request.phase}", (_as_they_are(each),))
        for each in found
        if sends and not each.impl.rounds
    )
    against, why = [], "rows are sent as they are"
    if not sends:
        why = "no rank sends its rows to experts"
        against = [Reason("layout", why)]
    elif len(losers) == len(found):
        against = [reason for each in losers for reason in each.reasons]
    if asked and against:
        cause = f"--rounded-from {asked} was asked for, and this plan cannot do it."
        raise RefusedError(cause, "Leave --rounded-from out.", reasons=against)
    if asked is not None:
        said = "asked for" if asked else "switched off"
        ledger.record(KEY, asked, intent.origin(KEY), said, losers)
        return asked
    if against:
        ledger.record(KEY, 0, Origin.DERIVED, why, losers)
        return 0
    why = f"the experts round rows first, so ranks do and send half the bytes, from {LEAST} rows on"
    ledger.record(KEY, LEAST, Origin.SEED, why, losers)
    return LEAST


def least_rows(intent: Intent, selection: Selection, phase: Phase) -> int:
    """Rows of `phase` from which on those who send them round them; 0: never."""
    found = [each for each in _experts(selection) if each.request.phase is phase]
    if not found or not all(each.impl.rounds for each in found):
        return 0
    return LEAST if intent.rounded_from is None else intent.rounded_from


def _experts(selection: Selection) -> list[Choice]:
    return [each for each in selection.bundle.choices if each.request.op == EXPERTS]


def _as_they_are(choice: Choice) -> Reason:
    text = f"{choice.impl.id} takes rows as they are"
    return Reason("rows", text, {"impl": choice.impl.id, "phase": choice.request.phase.value})
