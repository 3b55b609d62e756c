"""From timings to tiers: which method from which size on, cut only where buckets are cut.

Decode messages come in a few sizes, one per captured batch (`decode_buckets`); between and above
them stand powers of two. A limit that falls just below a captured size costs every step of that
batch, so tiers begin at buckets. A method takes over where it wins at two buckets running, each
time by more than `MIN_GAIN` and three spreads; one fast sample makes no tier, and a sample that
beats a smaller message of the same method counts as that one's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log

from metainfer.comm.request import ELEMENT_BYTES
from metainfer.core.ledger import Origin

MIN_GAIN = 0.03
MIN_RUN = 2
_TOP = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A size that steps produce. `rows`: padded batch times one plus draft tokens, 0 between."""

    bytes: int
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One method at one size: median and spread in microseconds, the worst rank's."""

    us: float
    mad: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """From `bytes_from` up to, not with, `bytes_to`: `method` is ``backend:algorithm``."""

    bytes_from: int
    bytes_to: int
    method: str
    origin: Origin
    why: str
    us: float | None = None  # at bytes_from
    second: str = ""
    pinned: bool = False


def decode_buckets(
    batches: Sequence[int], hidden: int, dtype: str = "bfloat16", drafts: Sequence[int] = (0,)
) -> tuple[Bucket, ...]:
    """Payloads of the captured decode batches, ``batch * (1 + draft) * hidden`` elements, and the
    powers of two between them, in ascending order."""
    width = hidden * ELEMENT_BYTES[dtype]
    rows = sorted({batch * (1 + draft) for batch in batches for draft in drafts})
    sizes = {row * width: row for row in rows}
    power = 1024
    while sizes and power < max(sizes):
        if power > min(sizes):
            sizes.setdefault(power, 0)
        power *= 2
    return tuple(Bucket(bytes=size, rows=sizes[size]) for size in sorted(sizes))


def find_tier(tiers: Sequence[Tier], size: int) -> Tier | None:
    """The tier of a message of `size` bytes; below the first one, the first."""
    if not tiers:
        return None
    return max((t for t in tiers if t.bytes_from <= size), default=tiers[0], key=_begin)


def _begin(tier: Tier) -> int:
    return tier.bytes_from


def make_tiers(
    buckets: Sequence[Bucket],
    timings: Mapping[str, Mapping[int, Sample]],
    origin: Origin = Origin.RECORD,
) -> tuple[Tier, ...]:
    """The tiers with the least product of times over all buckets, under the rules above.

    `timings[method][bytes]`; a method without a sample at a bucket cannot serve it. Buckets that no
    method was timed at join the tier below them. Ties go to the method named first.
    """
    timed = [b for b in buckets if any(b.bytes in row for row in timings.values())]
    if not timed:
        return ()
    choice = _best_path(timed, timings)
    starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(choice)) if a != b)]
    tiers = []
    for index, start in enumerate(starts):
        last = starts[index + 1] if index + 1 < len(starts) else len(timed)
        size = timed[start].bytes
        ranked = sorted(
            ((timings[m][size].us, m) for m in timings if size in timings[m]), key=lambda x: x[0]
        )
        method = choice[start]
        second = next((f"{m} {us:.4g} us" for us, m in ranked if m != method), "")
        tiers.append(
            Tier(
                bytes_from=size,
                bytes_to=timed[last].bytes if last < len(timed) else _TOP,
                method=method,
                origin=origin,
                why=f"fastest over {last - start} sizes from {size} B",
                us=timings[method][size].us,
                second=second,
            )
        )
    return tuple(tiers)


def _best_path(buckets: Sequence[Bucket], timings: Mapping[str, Mapping[int, Sample]]) -> list[str]:
    """Dynamic programme over (method, length of its run so far, capped); logs of times add up."""
    run = min(MIN_RUN, len(buckets))
    rows = {method: _monotone(buckets, row) for method, row in timings.items()}
    costs: dict[tuple[str, int], float] = {}
    trail: list[dict[tuple[str, int], tuple[str, int] | None]] = []
    for index in range(len(buckets)):
        now: dict[tuple[str, int], float] = {}
        back: dict[tuple[str, int], tuple[str, int] | None] = {}
        for method, row in rows.items():
            sample = row[index]
            if sample is None:
                continue
            if index == 0:
                now[method, 1], back[method, 1] = log(sample.us), None
            for (before, length), cost in costs.items():
                if before == method:
                    state = (method, min(run, length + 1))
                elif length >= run and _wins(row, rows[before], index):
                    state = (method, 1)
                else:
                    continue
                if cost + log(sample.us) < now.get(state, inf):
                    now[state], back[state] = cost + log(sample.us), (before, length)
        costs = now
        trail.append(back)
    ends = {state: cost for state, cost in costs.items() if state[1] >= run}
    if not ends:  # methods reach only some sizes: runs may have to be short
        return _greedy(buckets, timings)
    last: tuple[str, int] | None = min(ends, key=lambda item: ends[item])
    found: list[str] = []
    for back in reversed(trail):
        assert last is not None
        found.append(last[0])
        last = back[last]
    return found[::-1]


def _monotone(buckets: Sequence[Bucket], row: Mapping[int, Sample]) -> list[Sample | None]:
    """A row by bucket, times never falling: more bytes are never faster."""
    floor, found = 0.0, list[Sample | None]()
    for bucket in buckets:
        sample = row.get(bucket.bytes)
        if sample is not None:
            floor = max(floor, sample.us)
            sample = Sample(us=floor, mad=sample.mad)
        found.append(sample)
    return found


def _wins(new: Sequence[Sample | None], old: Sequence[Sample | None], index: int) -> bool:
    """Whether `new` may take over from `old` here: a clear win at this bucket and the next one."""
    for place in range(index, index + MIN_RUN):
        ours, theirs = (row[place] if place < len(row) else None for row in (new, old))
        if ours is None:
            return False
        gain = max(MIN_GAIN, 3 * ours.mad / ours.us)
        if theirs is not None and ours.us * (1 + gain) >= theirs.us:
            return False
    return True


def _greedy(buckets: Sequence[Bucket], timings: Mapping[str, Mapping[int, Sample]]) -> list[str]:
    """The fastest per bucket: where methods reach only some sizes, runs may have to be short."""
    found = []
    for bucket in buckets:
        able = [(row[bucket.bytes].us, m) for m, row in timings.items() if bucket.bytes in row]
        found.append(min(able, key=lambda x: x[0])[1])
    return found
