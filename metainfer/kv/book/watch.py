"""A prefix cache that never hits is an event, named by group (B-25).

A look-up is *eligible* when an earlier sequence computed the same prefix up to a grid position: a
hit was possible, and only eviction or a fault of ours prevents it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metainfer.kv.book.prefix import Prefix

if TYPE_CHECKING:
    from metainfer.kv.book.manager import KVManager

REMEMBERED = 8192
ALARM_AFTER = 20


@dataclass(slots=True)
class GroupHits:
    """`eligible` look-ups, and those in which this group alone could have resumed."""

    name: str
    eligible: int = 0
    hits: int = 0


class HitWatch:
    """Counts eligible look-ups against hits, in all and per group."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.groups = [GroupHits(name) for name in names]
        self.lookups = 0
        self.eligible = 0
        self.hits = 0
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def computed(self, digest: bytes) -> None:
        """A prompt was computed up to the grid position that `digest` names."""
        self._seen[digest] = None
        self._seen.move_to_end(digest)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def condemned(self, digest: bytes) -> None:
        """What was cached up to `digest` was forgotten on purpose: a miss there is none."""
        self._seen.pop(digest, None)

    def note(self, manager: KVManager, prefix: Prefix, tokens: int, hit: int) -> None:
        """Count one look-up of `tokens` tokens that resumed at `hit`."""
        self.lookups += 1
        if hit:
            self.eligible += 1
            self.hits += 1
            for group in self.groups:
                group.eligible += 1
                group.hits += 1
            return
        grid = manager.grid
        top = (tokens - 1) // grid * grid
        known = [end for end in range(grid, top + 1, grid) if prefix.at(end) in self._seen]
        if not known:
            return
        self.eligible += 1
        for spec in manager.groups:
            counts = self.groups[spec.index]
            counts.eligible += 1
            counts.hits += manager.resumable_alone(spec, prefix, known[-1])

    def alarm(self, manager: KVManager) -> str:
        """One line when many eligible look-ups met and none hit; empty otherwise."""
        if self.eligible < ALARM_AFTER or self.hits:
            return ""
        guilty = [g.name for g in self.groups if not g.hits] or ["no single group"]
        evicted = sum(pool.evictions for pool in manager.pools)
        evicted += sum(pool.evictions for pool in manager.snapshots.values())
        cause = f"{evicted} evictions so far" if evicted else "nothing was evicted"
        return f"0 of {self.eligible} eligible look-ups hit: group {', '.join(guilty)}; {cause}"
