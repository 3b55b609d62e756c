"""What domains send to experts that they share: rows as they are, or rounded first.

Kernels that round their rows before the first product take them rounded, to the same bits, so a
rank may round its own and send half the bytes. That costs a launch and longer routing weights.
"""

from __future__ import annotations

from metainfer.core.ledger import DecisionLedger, Loser, Origin
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason
from metainfer.kernels.select import Choice, Selection

LEAST = 64
"""Rows of a rank from which on half of their bytes is more than a launch: two ranks through host
memory need about 5 us for 64 rows of 4,096 channels, by `comm.model`; a seed."""
EXPERTS = "moe_experts"


def rounded_from(layout: LayoutPlan, selection: Selection, ledger: DecisionLedger) -> int:
    """The plan's `rounded_from`: rows of a rank from which on they are rounded before they are sent
    to the experts, in phases whose kernel takes them so; 0: never."""
    if layout.expert == 1 or (layout.expert <= layout.tensor and layout.prefill == 1):
        ledger.record("rounded_from", 0, Origin.DERIVED, "no rank sends its rows to experts")
        return 0
    found = _experts(selection)
    losers = tuple(
        Loser(f"rounded@{each.request.phase}", (_as_they_are(each),))
        for each in found
        if not each.impl.rounds
    )
    if len(losers) == len(found):
        why = "rows are sent as they are"
        ledger.record("rounded_from", 0, Origin.DERIVED, why, losers)
        return 0
    why = f"the experts round rows first, so ranks do and send half the bytes, from {LEAST} rows on"
    ledger.record("rounded_from", LEAST, Origin.SEED, why, losers)
    return LEAST


def takes_rounded(selection: Selection, phase: Phase) -> bool:
    """Whether the experts' kernels of `phase` take rounded rows."""
    found = [each for each in _experts(selection) if each.request.phase is phase]
    return bool(found) and all(each.impl.rounds for each in found)


def _experts(selection: Selection) -> list[Choice]:
    return [each for each in selection.bundle.choices if each.request.op == EXPERTS]


def _as_they_are(choice: Choice) -> Reason:
    text = f"{choice.impl.id} takes rows as they are"
    return Reason("rows", text, {"impl": choice.impl.id, "phase": choice.request.phase.value})
