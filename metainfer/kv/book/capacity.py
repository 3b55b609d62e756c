"""How much fits: page arithmetic over an empty pool, and the check of limits against it."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.plan import Limits
from metainfer.core.verdict import Verdict, all_of, reject
from metainfer.kv.book.spec import GroupKind, GroupSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """What one KV domain owns: the account's and the store's common measure.

    `pages[g]`: rows of group g's page tensor, page 0 included, which is never handed out (padding
    rows read it); 0 for state groups. `snapshots[g]`: places for copies of state group g.
    `slots`: sequences that run at once; domain d has the slot ids from ``d * slots`` on.
    """

    groups: tuple[GroupSpec, ...]
    pages: tuple[int, ...]
    snapshots: tuple[int, ...] = ()
    slots: int = 1
    domains: int = 1

    def places(self, group: int) -> int:
        """Snapshot places of one group."""
        return self.snapshots[group] if group < len(self.snapshots) else 0

    def bytes(self) -> int:
        """Device bytes of one domain: pages, slot states (one more for padding) and snapshots."""
        return sum(self.group_bytes(group) for group in self.groups)

    def group_bytes(self, group: GroupSpec) -> int:
        """Device bytes of one group, as the store allocates it."""
        if group.kind is not GroupKind.STATE:
            return self.pages[group.index] * group.page_bytes
        snapshots = self.places(group.index) * group.snapshot_bytes
        return (self.slots + 1) * group.slot_bytes + snapshots


def usable(sizes: CacheSizes, group: GroupSpec) -> int:
    """Pages of a group that requests can hold."""
    return max(0, sizes.pages[group.index] - 1)


def pages_needed(group: GroupSpec, tokens: int) -> int:
    """Fewest pages with which a lone sequence can grow to `tokens` tokens, in steps of one."""
    return 0 if group.kind is GroupKind.STATE else group.live_pages(tokens)


def fits(sizes: CacheSizes, tokens: int) -> Verdict:
    """Whether `tokens` cached tokens of one sequence ever fit, given the whole pool."""
    verdicts = []
    for group in sizes.groups:
        need, have = pages_needed(group, tokens), usable(sizes, group)
        if need > have:
            message = (
                f"{tokens} tokens need {need} pages of group {group.name}, the pool has {have}"
            )
            verdicts.append(reject("pages", message, group=group.name, need=need, have=have))
    return all_of(verdicts)


def longest(sizes: CacheSizes) -> int:
    """Most tokens one sequence can cache when it has the pool to itself; 0 when none fits."""
    limit = 2**31 - 1
    for group in sizes.groups:
        if group.kind is GroupKind.STATE:
            continue
        have = usable(sizes, group)
        saturated = group.kind is GroupKind.WINDOW and group.live_pages(limit) <= have
        if not saturated:
            limit = min(limit, have * group.page_tokens)
    return limit


def steady_pages(group: GroupSpec, *, tokens: int, slots: int, step_tokens: int) -> int:
    """Rows a group's tensor needs so that `slots` sequences of `tokens` tokens never wait for it.

    A window group also holds the chunk in flight until its step is over: `step_tokens` of pages,
    and one partial page for each slot.
    """
    if group.kind is GroupKind.STATE:
        return 0
    pages = slots * group.live_pages(tokens) + 1
    if group.kind is GroupKind.WINDOW:
        pages += group.pages_for(step_tokens) + slots
    return pages


def check_limits(sizes: CacheSizes, limits: Limits) -> Verdict:
    """Every reason why these limits cannot be kept in these sizes (B-20, B-21).

    `max_running` sequences must each hold at least their first page; one sequence must reach
    `max_context`.
    """
    found = [fits(sizes, limits.max_context)]
    most = most_running(sizes)
    if limits.max_running > most:
        message = f"{limits.max_running} running sequences asked, caches allow {most}"
        found.append(reject("max_running", message, asked=limits.max_running, allowed=most))
    return all_of(found)


def most_running(sizes: CacheSizes) -> int:
    """Sequences that can hold a slot and one page in each group."""
    paged = [usable(sizes, g) for g in sizes.groups if g.kind is not GroupKind.STATE]
    return min([sizes.slots, *paged])
