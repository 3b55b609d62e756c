"""The account of one domain: hits on a common grid, charges, touched pages, audit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from metainfer.core.errors import InternalError
from metainfer.core.verdict import Verdict
from metainfer.kv.book import audit
from metainfer.kv.book.blocks import PagePool
from metainfer.kv.book.capacity import CacheSizes
from metainfer.kv.book.form import plain
from metainfer.kv.book.manager import Account, KVManager
from metainfer.kv.book.spec import CacheSpec, GroupKind, GroupSpec, Rewind, form_groups


def spec(kind: GroupKind, name: str, **more: object) -> CacheSpec:
    form = plain("l", int(str(more.pop("bytes", 2))), "uint8")
    fields = {"layer": 0, "form": form} | more
    return CacheSpec(name=name, kind=kind, **fields)  # type: ignore[arg-type]


def make(groups: tuple[GroupSpec, ...], pages: int = 100, snapshots: int = 4) -> KVManager:
    states = [g.kind is GroupKind.STATE for g in groups]
    return KVManager(
        CacheSizes(
            groups=groups,
            pages=tuple(0 if state else pages for state in states),
            snapshots=tuple(snapshots if state else 0 for state in states),
            slots=8,
        )
    )


def begin(kv: KVManager, slot: int, tokens: list[int]) -> Account:
    prefix = kv.prefix(tokens, "")
    hit = kv.match(prefix, len(tokens))
    kv.note_lookup(prefix, len(tokens), hit)
    account, _ = kv.open(slot, prefix, hit)
    kv.opening_moves(account)
    return account


def compute(
    kv: KVManager, account: Account, end: int, chunk: int = 10**9, *, audited: bool = True
) -> None:
    """Advance to `end` as the scheduler would, ending chunks on the grid."""
    at = account.length
    while at < end:
        stop = min(end, at + chunk)
        if kv.aligns_chunks and stop // kv.grid * kv.grid > at:
            stop = stop // kv.grid * kv.grid
        kv.state_moves(account, at)
        assert not isinstance(kv.reserve(account, stop), Verdict)
        kv.commit(account, stop)
        if audited:
            audit.check(kv)
        at = stop
    kv.state_moves(account, at)


def mixed_blocks() -> tuple[GroupSpec, ...]:
    """Blocks 64, 128 and 256, a window on the middle one, and a saved state."""
    specs = (
        spec(GroupKind.PAGED, "a"),
        spec(GroupKind.WINDOW, "swa", window=100),
        spec(GroupKind.PAGED, "c"),
        spec(GroupKind.STATE, "s", bytes=8, rows=1, rewind=Rewind.SNAPSHOT),
    )
    groups = form_groups(specs, page_tokens=64)
    return (
        groups[0],
        replace(groups[1], page_tokens=128),
        replace(groups[2], page_tokens=256),
        replace(groups[3], snapshot_tokens=256),
    )


def test_b25_second_identical_prompt_hits_the_aligned_prefix() -> None:
    kv = make(mixed_blocks())
    assert (kv.grid, kv.unit) == (256, 64)
    tokens = [i % 91 for i in range(1100)]
    first = begin(kv, 0, tokens)
    compute(kv, first, 1100, chunk=300)
    kv.free(first)
    second = begin(kv, 1, list(tokens))
    assert second.length == 1024
    assert [len(t) - live for t, live in zip(second.tables, second.live, strict=True)] == [16, 1, 4]
    kv.free(second)
    audit.check_idle(kv)


def test_b25_a_missing_group_costs_only_its_tail() -> None:
    """Without the window's last page the hit falls back to the grid position before, not to 0."""
    kv = make(mixed_blocks()[:3])
    tokens = [i % 91 for i in range(1100)]
    account = begin(kv, 0, tokens)
    compute(kv, account, 1100)
    kv.free(account)
    pool = kv.pools[1]
    page = pool.index[account.prefix.at(1024)]
    del pool.cached[page]
    pool._forget(page)
    pool.free.append(page)
    assert kv.match(account.prefix, 1100).tokens == 768
    audit.check_idle(kv)


@pytest.mark.parametrize("broken", ["swa-window100", "s", ""])
def test_b25_alarm_names_the_group(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retained blocks written on a grid that is never looked up: hit rate zero, and an event."""
    kv = make(mixed_blocks(), pages=2000, snapshots=200)
    if broken == "s":
        monkeypatch.setattr(kv.snapshots[3], "save", lambda key: None)
    elif broken:
        real = kv.pools[1].register
        monkeypatch.setattr(kv.pools[1], "register", lambda page, key: real(page, b"x" + key))
    for i in range(40):
        tokens = [i // 2] * 600
        account = begin(kv, 0, tokens)
        at = account.length
        while at < 600:
            stop = min(600, (at // 256 + 1) * 256)
            kv.state_moves(account, at)
            kv.reserve(account, stop)
            kv.commit(account, stop)
            at = stop
        kv.note_prompt(account.prefix, 600)
        kv.free(account)
    alarm = kv.watch.alarm(kv)
    if broken:
        assert alarm == f"0 of 20 eligible look-ups hit: group {broken}; nothing was evicted"
    else:
        assert alarm == "" and kv.watch.hits == 20


def test_b25_impossible_caching_is_a_verdict() -> None:
    kv = make(mixed_blocks(), snapshots=0)
    assert not kv.caching
    assert "state group s can be resumed nowhere" in kv.cache_verdict.reasons[0].message


def window_groups(window: int = 16, page: int = 4) -> tuple[GroupSpec, ...]:
    return form_groups((spec(GroupKind.WINDOW, "swa", window=window),), page_tokens=page)


def test_b28_a_cached_window_is_not_charged_again() -> None:
    """Pinned and missing pages of a resumed request together never exceed what it holds alone."""
    for length in range(2, 80):
        kv = make(window_groups(), pages=1 + window_groups()[0].live_pages(200))
        tokens = list(range(length))
        account = begin(kv, 0, tokens)
        compute(kv, account, length, chunk=1)
        kv.free(account)
        hit = kv.match(account.prefix, length)
        assert kv.missing(length + 1, hit) <= [kv.pools[0].available]


def test_b28_cached_pages_are_charged_while_nobody_holds_them() -> None:
    """A hit pins pages that counted as available; pages that another sequence holds are free."""
    kv = make(form_groups((spec(GroupKind.PAGED, "kv"),), page_tokens=4), pages=9)
    tokens = list(range(20))
    account = begin(kv, 0, tokens)
    compute(kv, account, 17)
    hit = kv.match(account.prefix, 20)
    assert hit.tokens == 16
    assert kv.missing(20, hit) == [1]
    kv.free(account)
    assert kv.missing(20, hit) == [5]


def test_b28_rejections_name_the_numbers() -> None:
    kv = make(window_groups(), pages=3)
    account = begin(kv, 0, list(range(20)))
    verdict = kv.reserve(account, 20)
    assert isinstance(verdict, Verdict)
    assert verdict.reasons[0].data == {"group": "swa-window16", "need": 5, "have": 2}
    assert kv.pools[0].used == 0, "a refused reservation takes nothing"
    assert kv.fit(account, 20) == 8


def test_b08_touched_pages() -> None:
    """Page operations of 8 sequences do not depend on the pool's size."""
    counts = []
    for pages in (200, 20_000):
        kv = make(mixed_blocks(), pages=pages)
        accounts = [begin(kv, i, [i] * 2000) for i in range(8)]
        for account in accounts:
            compute(kv, account, 1000, chunk=256, audited=False)
        before = kv.touched
        for step in range(1001, 1200):
            for account in accounts:
                if step > account.covered:
                    kv.reserve(account, step)
                kv.commit(account, step)
        counts.append(kv.touched - before)
    assert counts[0] == counts[1]
    # per sequence: 64-blocks 3 taken and 3 registered; 128 and window 1 or 2 each; 256 one each
    assert counts[0] <= 8 * (2 * 4 + 3 * 2 + 2 * 1)


def test_window_pages_are_given_back_and_stay_findable() -> None:
    kv = make(window_groups(), pages=100)
    tokens = list(range(200))
    account = begin(kv, 0, tokens)
    compute(kv, account, 200, chunk=7)
    assert kv.pools[0].used <= window_groups()[0].live_pages(200)
    assert kv.match(kv.prefix(tokens[:60], ""), 60).tokens == 56
    kv.free(account)


def test_eviction_takes_the_tail_of_the_oldest_first() -> None:
    kv = make(form_groups((spec(GroupKind.PAGED, "kv"),), page_tokens=4), pages=9)
    old, new = list(range(100, 116)), list(range(200, 216))
    for tokens in (old, new):
        account = begin(kv, 0, tokens)
        compute(kv, account, 16)
        kv.free(account)
    other = begin(kv, 1, [7] * 8)
    compute(kv, other, 8)
    assert kv.match(kv.prefix([*old, 1], ""), 17).tokens == 8
    assert kv.match(kv.prefix([*new, 1], ""), 17).tokens == 16


def test_equal_content_computed_twice_is_registered_once() -> None:
    kv = make(form_groups((spec(GroupKind.PAGED, "kv"),), page_tokens=4))
    tokens = list(range(9))
    one, two = begin(kv, 0, tokens), begin(kv, 1, tokens)
    compute(kv, one, 9)
    compute(kv, two, 9)
    assert len(kv.pools[0].index) == 2
    kv.free(two)
    kv.free(one)
    audit.check_idle(kv)
    kv.flush()
    assert kv.match(kv.prefix(tokens, ""), 9).tokens == 0
    audit.check_idle(kv)


def test_rewind_of_a_snapshot_state_returns_to_the_run() -> None:
    kv = make(mixed_blocks())
    account = begin(kv, 0, list(range(40)))
    compute(kv, account, 30)
    moves = kv.checkpoint(account, 30)
    assert [move.kind for move in moves] == ["save"]
    kv.reserve(account, 35)
    assert kv.rewind(account, 32, rejected=3) == 30
    assert [m.kind for m in kv.state_moves(account, 30)] == ["load"]
    assert kv.checkpoint(account, 30)
    assert kv.rewind(account, 35, rejected=0) == 35
    assert not kv.snapshots[3].scratch
    audit.check(kv)


def test_page_pool_refuses_misuse() -> None:
    pool = PagePool(3)
    with pytest.raises(InternalError):
        pool.take(3)
    page = pool.take(1)[0]
    pool.drop(page)
    with pytest.raises(InternalError):
        pool.drop(page)


@pytest.mark.parametrize("damage", ["refs", "table", "key", "leak", "snapshot", "window", "shared"])
def test_audit_finds(damage: str) -> None:
    """Every invariant can fail: one injected fault each."""
    kv = make((*mixed_blocks()[:2], *mixed_blocks()[3:]))
    kv = make(tuple(replace(g, index=i) for i, g in enumerate(kv.groups)))
    account = begin(kv, 0, [1] * 600)
    compute(kv, account, 600, chunk=256)
    audit.check(kv)
    pool = kv.pools[0]
    if damage == "refs":
        pool.refs[account.tables[0][0]] += 1
    elif damage == "table":
        account.tables[0][1] = account.tables[0][0]
    elif damage == "key":
        pool.keys[account.tables[0][0]] = b"other"
    elif damage == "leak":
        pool.free.pop()
    elif damage == "snapshot":
        kv.snapshots[2].free.pop()
    elif damage == "window":
        account.live[1] -= 1
    elif damage == "shared":
        other = begin(kv, 1, [2] * 10)
        kv.reserve(other, 10)
        other.tables[0][0] = account.tables[0][-1]
    with pytest.raises(InternalError, match="is broken"):
        audit.check(kv)


def test_audit_finds_leaks_when_idle() -> None:
    kv = make(window_groups())
    begin(kv, 0, [1, 2])
    with pytest.raises(InternalError, match="slot 0"):
        audit.check_idle(kv)


def test_random_accounts_stay_sound() -> None:
    """Sequences come, grow, share and go in any order; the audit passes after every operation."""
    draw = random.Random("accounts")
    kv = make(mixed_blocks(), pages=60)
    stems = [[i] * 1500 for i in range(3)]
    running: dict[int, Account] = {}
    for _ in range(400):
        slot = draw.randrange(8)
        if slot not in running:
            tokens = draw.choice(stems)[: draw.randrange(1, 1500)] + [9] * 40
            running[slot] = begin(kv, slot, tokens)
        elif draw.random() < 0.2:
            kv.free(running.pop(slot))
        else:
            account = running[slot]
            end = kv.fit(account, account.length + draw.randrange(1, 300))
            end = min(end, 1500, account.length + 300)
            if end > account.length and end <= len(account.prefix._tokens):
                compute(kv, account, end, chunk=draw.choice((1, 64, 300)) if end < 40 else 300)
        audit.check(kv)
    for account in running.values():
        kv.free(account)
    audit.check_idle(kv)
