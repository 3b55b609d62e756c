"""Steps that are measured in this process: those of a plan of one rank, or it is said at once."""

from __future__ import annotations

from metainfer.core.errors import RefusedError
from metainfer.planner.limits import CacheTooSmall
from metainfer.planner.resolve import Resolved


def check_alone(resolved: Resolved) -> None:
    """Nothing where the plan has one rank.

    Raises:
        RefusedError: it has several; what to do depends on whether one device holds the model.
    """
    layout = resolved.plan.layouts[0]
    if layout.ranks == 1:
        return
    alone = next(each for each in resolved.layouts if each.layout.ranks == 1)
    cause = f"steps of {layout.name} run on several ranks; one is measured."
    remedy = "Measure a plan of one rank (--parallel single)."
    if not alone.feasible:
        cause = f"{cause} No single device here holds the model with these limits."
        remedy = (
            "There is nothing to measure here: plans of several ranks go by what is known without. "
            "Measure on a device that holds the model."
        )
        if isinstance(alone.error, CacheTooSmall) and not alone.cannot:
            remedy = f"Measure within limits that one device holds: {alone.error.advised().remedy}"
    raise RefusedError(cause, remedy, reasons=alone.reasons, code="several_ranks")
