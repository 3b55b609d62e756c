"""The work of a segment as a few numbers, and what turns them into seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from metainfer.core.step import Phase


@dataclass(frozen=True, slots=True)
class Amounts:
    """A segment's work on its busiest rank. `flops`: of matrices; `attention`: FLOPs over cached
    keys; `moved`: bytes of weights and caches; `sent`: seconds of collectives; `kernels`: that run;
    `launches`: what the host launches one by one, in launches of a kernel with the Python in front
    of it, none where the step is replayed. `gain`: seconds that it takes one thing after the other
    over those that it takes, where that was measured."""

    rows: int
    flops: float
    attention: float
    moved: float
    sent: float = 0.0
    kernels: float = 0.0
    launches: float = 0.0
    gain: float = 1.0

    def taken(self, busy: float, launch_s: float) -> float:
        """Seconds of the step that computes for `busy`, a launch at `launch_s`: the device's or the
        host's, whichever are more; neither waits for the other in between."""
        return max((busy + self.sent) / self.gain, self.launches * launch_s)


class Price(Protocol):
    """Amounts of one segment in a phase -> seconds."""

    def __call__(self, phase: Phase, amounts: Amounts) -> float: ...
