"""What was decided of kernels and of measured needs, on the record."""

from __future__ import annotations

from metainfer.core.intent import Intent
from metainfer.core.ledger import DecisionLedger, Loser, Origin
from metainfer.kernels.bundles import pin_of
from metainfer.kernels.choice import Selection
from metainfer.planner.held import Held
from metainfer.planner.needs import MEASURED, ops_of


def record_selection(ledger: DecisionLedger, intent: Intent, selection: Selection) -> None:
    """The bundle, and the kernel of each site and phase, with everything that lost."""
    losers = tuple(Loser(refused.name, refused.reasons) for refused in selection.refused)
    pinned, asked = bool(intent.layouts), intent.origin("layouts")
    predicted = selection.bundle.seconds is not None
    least, first = "with the least predicted time", "declared first: no cost is known"
    ledger.record(
        "bundle",
        selection.bundle.name,
        asked if pinned else Origin.COST_MODEL if predicted else Origin.DEFAULT,
        f"the feasible set of shared layouts {least if predicted else first}",
        losers,
    )
    for choice in selection.bundle.choices:
        request = choice.request
        pin = pin_of(intent.ops, request) is not None
        measured = "record" in choice.why
        ranked = Origin.DEFAULT if choice.seconds is None else Origin.COST_MODEL
        asked = intent.origin("ops")
        origin = asked if pin else Origin.RECORD if measured else ranked
        ledger.record(
            f"ops.{request.site}@{request.phase.value}",
            choice.impl.id,
            origin,
            choice.why,
            tuple(Loser(loser.impl, loser.reasons) for loser in choice.rejected),
        )


def record_needs(ledger: DecisionLedger, held: Held, selection: Selection) -> None:
    """Where the ledger's transients, graphs and reserve come from: a record of this machine, or
    seeds. Of several rows of a kind the first is what is measured."""
    needs, rows = held.measured, {row.kind: row for row in reversed(held.beside)}
    row = rows["transient"]
    if needs is None:
        why = "from shapes alone; metainfer tune capacity MODEL measures it"
        ledger.record("transients", row.bytes, Origin.SEED, why)
        return
    why = f"{row.item}: {needs.origin}"
    if needs.ops != ops_of(selection.bundle):
        why += "; other kernels are chosen since, measure again"
    ledger.record("transients", row.bytes, Origin.RECORD, why)
    for key, kind, what in (
        ("standing", "graphs", "captured steps and library workspaces"),
        ("reserve", "reserve", "context, libraries and allocator"),
    ):
        if kind in rows and rows[kind].item.endswith(MEASURED):
            ledger.record(key, rows[kind].bytes, Origin.RECORD, f"{what}: {needs.origin}")
