"""Invariants of a KV account, checked when idle and after every test. Non-empty for every kind."""

from __future__ import annotations

from collections import Counter

from metainfer.core.errors import InternalError
from metainfer.kv.book.blocks import NULL_PAGE, PagePool, SnapshotPool
from metainfer.kv.book.manager import Account, KVManager


def faults(manager: KVManager) -> list[str]:
    """Every broken invariant in words; empty when the account is sound. O(pages)."""
    found: list[str] = []
    for i, group in enumerate(manager.paged):
        held: Counter[int] = Counter()
        for slot in sorted(manager.accounts):
            account = manager.accounts[slot]
            found += _table_faults(manager, i, account)
            held.update(account.tables[i][account.live[i] :])
        found += [f"{group.name}: {text}" for text in _pool_faults(manager.pools[i], held)]
    for index, snapshots in sorted(manager.snapshots.items()):
        name = manager.groups[index].name
        found += [f"{name}: {text}" for text in _snapshot_faults(manager, index, snapshots)]
    return found


def check(manager: KVManager) -> None:
    """Raise on any fault.

    Raises:
        InternalError: listing all faults.
    """
    found = faults(manager)
    if found:
        raise InternalError(f"KV account of domain {manager.domain} is broken: {'; '.join(found)}")


def check_idle(manager: KVManager) -> None:
    """`check`, and nothing may be held when no sequence runs."""
    check(manager)
    leaks = [f"slot {slot}" for slot in sorted(manager.accounts)]
    leaks += [
        f"{pool.used} pages of {g.name}"
        for g, pool in zip(manager.paged, manager.pools, strict=True)
        if pool.used
    ]
    if leaks:
        raise InternalError(f"idle, but still held: {', '.join(leaks)}")


def _table_faults(manager: KVManager, i: int, account: Account) -> list[str]:
    """One table: given-back entries are null, live ones real; coverage; shared pages are full."""
    group, pool, table, live = (
        manager.paged[i],
        manager.pools[i],
        account.tables[i],
        account.live[i],
    )
    where = f"{group.name} slot {account.slot}"
    found = []
    if any(page != NULL_PAGE for page in table[:live]):
        found.append(f"{where}: a given-back entry still names a page")
    if NULL_PAGE in table[live:]:
        found.append(f"{where}: a live entry has no page")
    if len(set(table[live:])) != len(table) - live:
        found.append(f"{where}: a page stands twice in one table")
    if len(table) * group.page_tokens < account.length:
        found.append(f"{where}: {account.length} tokens but {len(table)} pages")
    if group.window and live > max(0, account.length - group.window + 1) // group.page_tokens:
        found.append(f"{where}: a page inside the window was given back")
    if group.window:
        needed = max(0, account.length - group.window + 1) // group.page_tokens
        if account.registered[i] == account.length // group.page_tokens and live < needed:
            found.append(f"{where}: {needed - live} pages left the window but are still held")
    full = account.length // group.page_tokens
    for entry in range(live, len(table)):
        page = table[entry]
        key = pool.keys[page]
        if entry >= full and (pool.refs[page] != 1 or key is not None):
            found.append(f"{where}: page {page} is written to but shared or findable")
        if key is not None and key != account.prefix.at((entry + 1) * group.page_tokens):
            found.append(f"{where}: page {page} is registered under foreign content")
    return found


def _pool_faults(pool: PagePool, held: Counter[int]) -> list[str]:
    found = []
    free, cached = Counter(pool.free), pool.cached
    for page in range(pool.pages):
        if page == NULL_PAGE:
            wanted = (0, 0, False)
            state = (pool.refs[page] + held[page], free[page], page in cached)
        else:
            refs = pool.refs[page]
            key = pool.keys[page]
            state = (refs, free[page], page in cached)
            wanted = (
                held[page],
                1 if not held[page] and key is None else 0,
                not held[page] and key is not None,
            )
        if state != wanted:
            found.append(f"page {page} is (refs, free, cached) {state}, should be {wanted}")
    if pool.used + len(pool.free) + len(cached) != pool.total:
        found.append("free + cached + used is not the total")
    keyed = {key: page for page, key in enumerate(pool.keys) if key is not None}
    if keyed != pool.index:
        found.append("index and page keys disagree")
    return found


def _snapshot_faults(manager: KVManager, group: int, pool: SnapshotPool) -> list[str]:
    found = []
    places = Counter(pool.free) + Counter(pool.index.values()) + Counter(list(pool.scratch))
    if places != Counter(range(pool.places)):
        found.append("a snapshot place is lost or used twice")
    owned = {
        place: slot
        for slot in sorted(manager.accounts)
        for index, place in manager.accounts[slot].scratch
        if index == group
    }
    if owned != pool.scratch:
        found.append("scratch places and accounts disagree")
    return found
