"""What a served workload came to: first tokens, gaps, throughput, as percentiles. No torch.

``bench serve`` measures with the same types, so that simulated and measured are compared by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class Served:
    """One request. Seconds on the workload's clock; `times`: when each message with tokens came,
    `tokens` how many in each. `cached`: prompt tokens found in the cache, None where not told."""

    arrived_s: float
    prompt: int
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    cached: int | None = None
    preempted: int = 0
    error: str = ""

    @property
    def output(self) -> int:
        return sum(self.counts)


def percentile(values: Sequence[float], part: float) -> float | None:
    """The value below which `part` percent lie, by linear interpolation; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * part / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(served: Sequence[Served]) -> dict[str, object]:
    """Throughput over the span from the first arrival to the last token, and percentiles.

    ``ttft_s``: arrival to first token. ``itl_s``: between tokens of one answer, several that came
    together share the gap. ``e2e_s``: arrival to last token.
    """
    done = [each for each in served if each.times and not each.error]
    first = [each.times[0] - each.arrived_s for each in done]
    whole = [each.times[-1] - each.arrived_s for each in done]
    gaps = [
        (after - before) / count
        for each in done
        for before, after, count in zip(each.times, each.times[1:], each.counts[1:], strict=False)
        for _ in range(count)
    ]
    span = 0.0
    if done:
        span = max(each.times[-1] for each in done) - min(each.arrived_s for each in served)
    output, prompt = sum(each.output for each in done), sum(each.prompt for each in done)
    cached = [each.cached for each in done if each.cached is not None]
    return {
        "requests": len(done),
        "failed": len(served) - len(done),
        "duration_s": span,
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_tokens": sum(cached) if len(cached) == len(done) else None,
        "output_tok_s": output / span if span else None,
        "input_tok_s": prompt / span if span else None,
        "requests_s": len(done) / span if span else None,
        "ttft_s": spread(first),
        "itl_s": spread(gaps),
        "e2e_s": spread(whole),
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, percentiles and the largest."""
    found: dict[str, float | None] = {"mean": sum(values) / len(values) if values else None}
    found |= {f"p{part}": percentile(values, part) for part in PERCENTILES}
    found["max"] = max(values, default=None)
    return found


COMPARED = ("output_tok_s", "ttft_s.p50", "ttft_s.p95", "itl_s.p50", "itl_s.p95", "e2e_s.p50")


def compared(simulated: Mapping[str, object], measured: Mapping[str, object]) -> dict[str, object]:
    """Relative error of each figure that both hold: simulated over measured, less one."""
    errors: dict[str, object] = {}
    for key in COMPARED:
        ours, theirs = figure(simulated, key), figure(measured, key)
        if ours is not None and theirs:
            errors[key] = {"simulated": ours, "measured": theirs, "error": ours / theirs - 1}
    return errors


def figure(document: Mapping[str, object], key: str) -> float | None:
    """The number at a dotted path; None where there is none."""
    value: object = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None
