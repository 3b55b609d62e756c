"""Counters and gauges of the scheduler; plain numbers that only it writes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SLICE_S = 5.0
SLICES = 12


@dataclass(slots=True)
class Counters:
    """Only grow. `prompt_tokens` are computed ones, `cached_tokens` those found in the cache."""

    steps: int = 0
    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    rejected: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_query_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """A reading: gauges now, counters since start. Gaps are of the last minute, per domain."""

    running: int
    waiting: int
    kv_used: float
    decode_gaps_s: tuple[float, ...]
    cache_alarms: tuple[str, ...]
    counters: Counters

    @property
    def longest_decode_gap_s(self) -> float:
        return max(self.decode_gaps_s, default=0.0)


class GapWindow:
    """The longest time between two tokens of one answer, over the last minute."""

    def __init__(self) -> None:
        self._slices: deque[tuple[int, float]] = deque(maxlen=SLICES)

    def note(self, now: float, gap: float) -> None:
        number = int(now / SLICE_S)
        if self._slices and self._slices[-1][0] == number:
            self._slices[-1] = (number, max(gap, self._slices[-1][1]))
        else:
            self._slices.append((number, gap))

    def longest(self, now: float) -> float:
        oldest = int(now / SLICE_S) - SLICES
        return max((gap for number, gap in self._slices if number > oldest), default=0.0)
