"""A layout as it was judged: what it holds and gives, or every reason why it cannot be."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.errors import RefusedError
from metainfer.core.plan import LayoutPlan
from metainfer.core.verdict import Reason
from metainfer.kernels.choice import Selection
from metainfer.planner.calibration import Calibration
from metainfer.planner.held import Held
from metainfer.planner.predict import Prediction
from metainfer.planner.steps import StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout with what it holds, or with every reason why it cannot be.

    `cannot`: what forbids it whatever the memory; `error`: what memory lacks. `longest`: tokens of
    the longest sequence that one domain can hold; where the declared context
    does not fit, of what would. `pairs`: (context, sequences at once). `cost`: what its steps cost,
    where the family can say; `calibration`: how long they took here.
    """

    layout: LayoutPlan
    cannot: tuple[Reason, ...] = ()
    planned_only: tuple[Reason, ...] = ()
    selection: Selection | None = None
    held: Held | None = None
    error: RefusedError | None = None
    prediction: Prediction | None = None
    cost: StepCost | None = None
    calibration: Calibration | None = None
    longest: int | None = None
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Everything against it, in one list."""
        return (*self.cannot, *(self.error.reasons if self.error is not None else ()))

    @property
    def feasible(self) -> bool:
        return self.held is not None

    @property
    def built(self) -> bool:
        """Whether this release can run it, and not only plan it."""
        return not self.planned_only
