"""The memory ledger: what is held where, line by line, and how many cached tokens are left.

Bytes come from shapes and layouts, never from a measurement of this run; the executor's own count
is compared with them after loading.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metainfer.core.errors import RefusedError
from metainfer.core.plan import LedgerRow
from metainfer.core.verdict import Reason
from metainfer.kv.book.capacity import CacheSizes, pages_needed, steady_pages
from metainfer.kv.book.spec import GroupKind, GroupSpec, hit_grid

RESERVE_PART = 0.08
"""Share of device memory left to the framework's context and fragmentation (seed)."""

MARGIN_PART = 0.01
"""Share of device memory left free beside a measured reserve (seed)."""

HIT_PART = 1 / 16
"""Share of the cache for what windows and slot states keep beside running sequences (seed)."""


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """How the cache was sized. `tokens`: most tokens that fit when spread over sequences."""

    sizes: CacheSizes
    tokens: int
    limited_by: str


def size_cache(
    groups: Sequence[GroupSpec],
    budget_bytes: int,
    *,
    context: int,
    running: int,
    step_tokens: int,
    caching: bool = True,
) -> CacheBudget:
    """Pages per group within `budget_bytes`, or as many as `running` full sequences could use.

    Each group has what one sequence of `context` tokens needs of it; the rest is shared in
    proportion to what is still wanted. With `caching`, windows and states get room for what hits
    need beside running sequences.

    Raises:
        RefusedError: one sequence of `context` tokens does not fit; says what would.
    """
    states = sum((running + 1) * group.slot_bytes for group in groups)
    least = _fewest(groups, context)
    needed = states + _page_bytes(groups, least)
    if needed > budget_bytes:
        raise _too_small(groups, needed, states, budget_bytes, context)
    wanted = [
        max(steady_pages(group, tokens=context, slots=running, step_tokens=step_tokens), few)
        for group, few in zip(groups, least, strict=True)
    ]
    left = budget_bytes - needed
    kept = _kept_for_hits(
        groups, context * running, min(int(budget_bytes * HIT_PART), left) if caching else 0
    )
    places = [
        count if g.kind is GroupKind.STATE else 0 for count, g in zip(kept, groups, strict=True)
    ]
    further = [
        0 if g.kind is GroupKind.STATE else count for count, g in zip(kept, groups, strict=True)
    ]
    left -= sum(_kept_bytes(group, count) for group, count in zip(groups, kept, strict=True))
    more = _page_bytes(groups, wanted) - _page_bytes(groups, least)
    limited_by = "memory" if more > left else "concurrency times context"
    shared = min(left, more)
    pages = [
        few + (most - few) * shared // max(more, 1) + extra
        for few, most, extra in zip(least, wanted, further, strict=True)
    ]
    sizes = CacheSizes(
        groups=tuple(groups), pages=tuple(pages), snapshots=tuple(places), slots=running
    )
    return CacheBudget(sizes, _spread_tokens(sizes), limited_by)


def _fewest(groups: Sequence[GroupSpec], context: int) -> list[int]:
    """Rows of each group's tensor with which one sequence can grow to `context` tokens."""
    return [
        0 if group.kind is GroupKind.STATE else pages_needed(group, context) + 1 for group in groups
    ]


def _page_bytes(groups: Sequence[GroupSpec], pages: Sequence[int]) -> int:
    return sum(count * group.page_bytes for count, group in zip(pages, groups, strict=True))


def _too_small(
    groups: Sequence[GroupSpec], needed: int, states: int, budget_bytes: int, context: int
) -> RefusedError:
    """What is short, and the two values with which `size_cache` succeeds."""
    lengths = range(1, context)
    reach = bisect.bisect_right(
        lengths, budget_bytes - states, key=lambda n: _page_bytes(groups, _fewest(groups, n))
    )
    enough = f"--kv-memory to {-(-needed >> 20)}MiB."
    message = f"{needed:,} B needed, {budget_bytes:,} B available"
    return RefusedError(
        f"a context of {context:,} tokens needs {needed:,} B of cache, "
        f"{budget_bytes:,} B are left for it.",
        f"Lower --context to {reach:,}, or raise {enough}" if reach else f"Raise {enough}",
        reasons=(Reason("memory", message, {"need": needed, "have": budget_bytes}),),
        code="does_not_fit",
    )


def _kept_for_hits(groups: Sequence[GroupSpec], tokens: int, room_bytes: int) -> list[int]:
    """Snapshot places of each state group and further pages of each window group.

    A hit needs a window's last pages and a snapshot of each state that is not clean; both are kept
    for as many positions of the grid as `tokens` cached tokens have, within `room_bytes`.
    """
    each = sum(_kept_bytes(group, _kept_each(group)) for group in groups)
    positions = min(tokens // hit_grid(tuple(groups)), room_bytes // each) if each else 0
    return [positions * _kept_each(group) for group in groups]


def _kept_each(group: GroupSpec) -> int:
    """Pages or places of a group that one position of the grid needs."""
    if group.kind is GroupKind.WINDOW:
        return -(-(group.window - 1) // group.page_tokens)
    return int(bool(group.snapshot_tokens))


def _kept_bytes(group: GroupSpec, count: int) -> int:
    return count * (group.page_bytes if group.kind is GroupKind.WINDOW else group.snapshot_bytes)


def kv_rows(sizes: CacheSizes, tokens: int) -> list[LedgerRow]:
    """One row per group: allocated, and what `tokens` cached tokens (a window of each slot, the
    rows of each slot) need of it."""
    rows = []
    for group in sizes.groups:
        logical = sizes.slots * group.slot_bytes
        if group.kind is not GroupKind.STATE:
            held = tokens if group.kind is GroupKind.PAGED else sizes.slots * group.window
            logical = held // group.tokens_per_entry * group.form.bytes * len(group.layers)
            logical = -(-logical // group.shards)
        allocated = sizes.group_bytes(group)
        rows.append(LedgerRow(item=group.name, kind="kv", bytes=allocated, logical_bytes=logical))
    return rows


def total(rows: Sequence[LedgerRow], kinds: Mapping[str, None] | None = None) -> int:
    """Bytes of all rows, or of those whose kind is listed."""
    return sum(row.bytes for row in rows if kinds is None or row.kind in kinds)


def _spread_tokens(sizes: CacheSizes) -> int:
    """Tokens that paged groups hold in all; with windows only, what the windows hold."""
    paged = [
        (sizes.pages[group.index] - 1) * group.page_tokens
        for group in sizes.groups
        if group.kind is GroupKind.PAGED
    ]
    if paged:
        return min(paged)
    windows = [
        (sizes.pages[group.index] - 1) * group.page_tokens
        for group in sizes.groups
        if group.kind is GroupKind.WINDOW
    ]
    return min(windows, default=0)
