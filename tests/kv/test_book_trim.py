"""Pages that only drafts wanted come back, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.verdict import Verdict
from metainfer.kv.book import audit
from metainfer.kv.book.capacity import CacheSizes
from metainfer.kv.book.form import plain
from metainfer.kv.book.manager import KVManager
from metainfer.kv.book.spec import CacheSpec, GroupKind, form_groups

FORM = plain("l", 2, "uint8")
SPECS = (
    CacheSpec(layer=0, name="kv", kind=GroupKind.PAGED, form=FORM),
    CacheSpec(layer=1, name="swa", kind=GroupKind.WINDOW, form=FORM, window=7),
)


@given(
    shared=st.integers(0, 40),
    confirmed=st.integers(1, 60),
    due=st.integers(0, 3),
    drafts=st.integers(0, 7),
    page=st.sampled_from([4, 8]),
)
def test_trim_gives_back_what_was_reserved_beyond(
    shared: int, confirmed: int, due: int, drafts: int, page: int
) -> None:
    """Also behind a hit and a window; afterwards the same positions can be reserved again."""
    groups = form_groups(SPECS, page_tokens=page)
    groups = (groups[0], replace(groups[1], page_tokens=4))  # another page than the first
    kv = KVManager(CacheSizes(groups=groups, pages=(40, 60), slots=2))
    tokens = list(range(100))
    first = kv.prefix(tokens[:shared], "")
    account, _ = kv.open(0, first, kv.match(first, shared or 1))
    assert not isinstance(kv.reserve(account, shared), Verdict)
    kv.commit(account, shared)

    prefix = kv.prefix(tokens, "")
    hit = kv.match(prefix, max(confirmed, 1))
    mine, _ = kv.open(1, prefix, hit)
    confirmed = max(confirmed, hit.tokens)
    assert not isinstance(kv.reserve(mine, confirmed), Verdict)
    kv.commit(mine, confirmed)
    assert not isinstance(kv.reserve(mine, confirmed + due), Verdict)
    before = [pool.available for pool in kv.pools]
    covered, tables = mine.covered, [list(table) for table in mine.tables]
    assert not isinstance(kv.reserve(mine, confirmed + due + drafts), Verdict)
    audit.check(kv)
    kv.trim(mine, confirmed + due)
    audit.check(kv)
    assert [pool.available for pool in kv.pools] == before
    assert (mine.covered, mine.tables) == (covered, tables)
    grants = kv.reserve(mine, confirmed + due + drafts)
    assert not isinstance(grants, Verdict)
    assert all(g.first == len(t) for g in grants for t in [tables[g.group]])
    kv.free(mine)
    kv.free(account)
    audit.check_idle(kv)
