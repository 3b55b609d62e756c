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

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from metainfer.core.step import StepPlan, StepResult

if TYPE_CHECKING:
    from metainfer.comm.emulated_ranks import EmulatedRanks
    from metainfer.executor.finite import Place
    from metainfer.executor.slots import OpenGrammar


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


class LateExecutor(Executor, Protocol):
    """One whose steps may be under way when `submit` returns (ADR 0033)."""

    @property
    def unread(self) -> bool:
        """Whether the latest open plan is still on its way."""
        ...

    def waits_for(self, plan: StepPlan) -> str:
        """Why that one has to be read before `plan` is launched; empty where it has not."""
        ...


class ServingExecutor(LateExecutor, Protocol):
    """What an engine runs on, with weights and caches: a device, or ranks that act as one."""

    def use_grammars(self, make: OpenGrammar) -> None:
        """From now on requests may carry a grammar; `make` gives its state as they enter."""
        ...

    def warm(self, on_bucket: Callable[[str], None] = ...) -> None:
        """Run and capture all that a step may need; `on_bucket` is told each in words."""
        ...

    @property
    def draws(self) -> dict[str, int]:
        """How the draws behind captured steps were launched, and how often."""
        ...

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes in fact held on a card, by the kinds of the plan's memory ledger."""
        ...

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes that came from other ranks because they share rows or the cache, by what they
        were."""
        ...


@runtime_checkable
class OneDevice(Protocol):
    """What an executor offers beside that when it decides for itself. Ranks answer as a group: what
    one of them does alone would part it from the others."""

    nan_guard: NanGuard
    emulated: EmulatedRanks | None

    def locate(self, plan: StepPlan, slot: int) -> Place | None:
        """Where the run of `slot` in the latest plan first met NaN or infinity; None: not again."""
        ...

    def free_memory(self) -> int:
        """Give back what caches of the allocator hold; bytes that are free afterwards."""
        ...

    def eager(self) -> AbstractContextManager[None]:
        """Inside, captured steps run op by op."""
        ...
