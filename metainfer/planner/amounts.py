"""The work of a segment as a few numbers, and what turns them into seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from metainfer.core.step import Phase


@dataclass(frozen=True, slots=True)
class Amounts:
    """A segment's work on its busiest rank. `flops`: of matrices; `attention`: FLOPs over cached
    keys; `moved`: bytes of weights and caches; `sent`: seconds of collectives; `kernels`: that are
    launched, by the host one by one where the step is `eager`."""

    rows: int
    flops: float
    attention: float
    moved: float
    sent: float = 0.0
    kernels: float = 0.0
    eager: bool = False


class Price(Protocol):
    """Amounts of one segment in a phase -> seconds."""

    def __call__(self, phase: Phase, amounts: Amounts) -> float: ...
