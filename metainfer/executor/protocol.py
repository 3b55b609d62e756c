"""What the engine's loop asks of a device, and the order in which a device obeys a plan.

Plans are executed strictly in the order of `submit`. Within one plan:

1. `released` slots are forgotten;
2. `new` requests take their slots (per-slot device rows and page tables start empty);
3. `pages` extend the page tables (`pages[i]` becomes entry `first + i`; entries below the first
   granted one are never read);
4. `copies`, then `moves`, each in list order (a place may be loaded from and then saved to);
5. the segments run, in order.

The result answers every run, in the order segments, ranks, runs: a chunk that does not sample gets
a `RunResult` without tokens. `Segment.ranks` has one entry per KV domain; an executor that splits a
domain over tensor-parallel ranks hands all of them that entry. Padding tokens write nothing.

A run may start below the position that the slot last computed: rejected drafts, or a state that was
copied back. Entries from its start on are simply overwritten; visibility is by position.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from metainfer.core.step import StepPlan, StepResult


class NanGuard(StrEnum):
    """What an executor looks at to find NaN and infinity.

    OFF: nothing; tokens are drawn from whatever is there. LOGITS: the rows that tokens are drawn
    from, and the last hidden states of the others. LAYERS: what every op returns, in every step,
    without graphs.
    """

    OFF = "off"
    LOGITS = "logits"
    LAYERS = "layers"


class Executor(Protocol):
    """A device, or several that act as one, allocated and warmed up. One thread calls it."""

    def submit(self, plan: StepPlan) -> None:
        """Queue one plan. At most two are open; the second may contain `PENDING` tokens."""
        ...

    def collect(self) -> StepResult:
        """The result of the oldest open plan; waits for it."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """`submit` and `collect` in one call, when nothing is open."""
        ...

    def close(self) -> None:
        """Release everything. Open plans are dropped. Idempotent."""
        ...
