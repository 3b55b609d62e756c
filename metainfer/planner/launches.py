"""What the host pays for a step that no graph holds: it launches every kernel, one by one.

A launch's price is that of the Python in front of it. It does not follow the length of a chunk, so
short chunks take as long as their launches; chunks whose rows ranks share have more of them.
"""

from __future__ import annotations

from metainfer.kv.book.spec import GroupKind
from metainfer.planner.work import RankWork
from metainfer.platform.facts import CUDA

LAUNCH_S = 90e-6
"""Host seconds of an eager launch, with the Python in front of it (seed): 485 launches of twelve
layers took 17 to 50 ms on hosts of an H200, whatever the chunk; this is of the slower ones."""

SHARED_LAUNCHES = 5.0
"""What a cache whose entries ranks share costs the host in a chunk, in launches (seed). Entries are
lifted, gathered and laid: 8 to 12 short calls of torch and a message. Twelve layers of V4 have 42
such caches, and `cp2/tp2` took 58.6 and 65.1 ms for 2,048 tokens of which the kernels are 44 by the
seed above (records 2026-11-30-2xh200-ranks-fourth and -third): 3.8 and 5.5 launches each. On a
host of 35 us a launch the calls take 123 us and a message 29 to 47: 4.3 to 4.9 (record
2026-11-30-h200-launches)."""


def launch_seconds(kind: str) -> float:
    """Of one launch on a device of that kind; elsewhere calls are what is computed."""
    return LAUNCH_S if kind == CUDA else 0.0


def sharing(work: RankWork) -> float:
    """What a chunk of `work` has beside those for sharing its entries: of every cache where ranks
    share its rows, of those that are dealt where they share these alone."""
    if work.layout.prefill > 1:
        caches = sum(not spec.borrows for spec in work.specs)
    elif work.layout.shards > 1:
        caches = sum(s.kind is GroupKind.PAGED and s.deals and not s.borrows for s in work.specs)
    else:
        caches = 0
    return SHARED_LAUNCHES * caches
