"""The last minutes of a server: percentiles of latencies, and samples of its load.

A latency costs one dictionary entry per slice and bucket, never one per token. Buckets grow by
5 %, so a percentile is within 2.5 % of the true one (half a bucket).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from math import exp, log

import msgspec

from metainfer.engine.protocol import EngineStats

SLICE_S = 10.0
SLICES = 30
WINDOW_S = SLICE_S * SLICES
SAMPLE_S = 2.0
SAMPLES = 300

_GROWTH = log(1.05)
_SMALLEST = 1e-6

Clock = Callable[[], float]


class Percentiles(msgspec.Struct, frozen=True):
    """Of `count` observations, in seconds; None where there were none."""

    count: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None


class Window:
    """Durations of the last five minutes, in slices of ten seconds."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._slices: deque[tuple[int, dict[int, int]]] = deque(maxlen=SLICES)

    def observe(self, seconds: float, count: int = 1) -> None:
        """`count` observations of `seconds` each."""
        number = int(self._clock() / SLICE_S)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, {}))
        counts = self._slices[-1][1]
        bucket = int(log(max(seconds, _SMALLEST) / _SMALLEST) / _GROWTH)
        counts[bucket] = counts.get(bucket, 0) + count

    def percentiles(self) -> Percentiles:
        oldest = int(self._clock() / SLICE_S) - SLICES
        merged: dict[int, int] = {}
        for number, counts in self._slices:
            if number > oldest:
                for bucket, count in counts.items():
                    merged[bucket] = merged.get(bucket, 0) + count
        total = sum(merged.values())
        found = [_quantile(merged, total, share) for share in (0.5, 0.95, 0.99)]
        return Percentiles(total, *found)


def _quantile(counts: dict[int, int], total: int, share: float) -> float | None:
    """The middle of the bucket that holds the observation of rank ``ceil(share * total)``."""
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= share * total:
            return _SMALLEST * exp((bucket + 0.5) * _GROWTH)
    return None


class Sample(msgspec.Struct, frozen=True):
    """Load at `t` (seconds since 1970); rates are over the time since the sample before."""

    t: float
    running: int
    waiting: int
    kv_used: float
    prompt_tok_s: float
    generated_tok_s: float


def _grown(before: int, now: int) -> int:
    """What a counter grew by; one that fell began again with a new engine."""
    return now - before if now >= before else now


class History:
    """Samples of the last ten minutes."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._before: tuple[float, int, int] | None = None

    def since(self, t: float) -> list[Sample]:
        """Samples later than `t`, oldest first."""
        return [sample for sample in self._samples if sample.t > t]

    def take(self, now: float, stats: EngineStats) -> None:
        """Add the sample of `now`; the first has nothing to compare with and is not kept."""
        before = self._before
        self._before = (now, stats.prompt_tokens, stats.generated_tokens)
        if before is None or now <= before[0]:
            return
        seconds = now - before[0]
        self._samples.append(
            Sample(
                round(now, 3),
                stats.running,
                stats.waiting,
                stats.kv_used,
                _grown(before[1], stats.prompt_tokens) / seconds,
                _grown(before[2], stats.generated_tokens) / seconds,
            )
        )

    async def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Sample for ever; whoever starts it cancels it."""
        while True:
            self.take(time.time(), stats())
            await asyncio.sleep(SAMPLE_S)
