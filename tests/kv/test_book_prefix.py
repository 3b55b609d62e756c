"""Keys name logical content: never shared by different content, always by equal content (B-27)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from metainfer.kv.book.capacity import CacheSizes
from metainfer.kv.book.form import plain
from metainfer.kv.book.manager import KVManager
from metainfer.kv.book.prefix import Prefix, digests, page_key, root
from metainfer.kv.book.spec import CacheSpec, GroupKind, GroupSpec, form_groups


def group(page: int = 8, **changes: object) -> GroupSpec:
    spec = CacheSpec(layer=0, name="kv", kind=GroupKind.PAGED, form=plain("l", 2, "uint8"))
    return replace(form_groups((spec,), page_tokens=page)[0], **changes)  # type: ignore[arg-type]


def test_b27_keys_follow_content() -> None:
    """100,000 random prompt pairs that share a random stem and differ or not after it."""
    draw = random.Random("b27")
    for _ in range(100_000):
        unit = draw.choice((2, 4, 8))
        first = draw.choices((0, 1, 2), k=draw.randrange(2, 25))
        stem = draw.randrange(len(first) + 1)
        second = first[:stem] + draw.choices((0, 1, 2), k=draw.randrange(9))
        salts = draw.choice((("", ""), ("a", "a"), ("a", "b"), ("", "a")))
        one, two = digests(first, unit, "m", salts[0]), digests(second, unit, "m", salts[1])
        for i, (x, y) in enumerate(zip(one, two, strict=False)):
            same = salts[0] == salts[1] and first[: (i + 1) * unit] == second[: (i + 1) * unit]
            assert (x == y) is same


def test_b27_physical_page_does_not_matter() -> None:
    """Neither the unit in which a chain is hashed nor the kernel's page changes a key."""
    tokens = list(range(48))
    by_unit = {unit: Prefix(tokens, unit, "m").at(48) for unit in (1, 2, 4, 8, 16, 48)}
    assert len(set(by_unit.values())) == 1
    digest = by_unit[8]
    keys = {page_key(digest, group(16, kernel_page_entries=entries)) for entries in (1, 4, 16)}
    assert len(keys) == 1


@pytest.mark.parametrize(
    "change", [{"name": "index"}, {"form": plain("fp8", 2, "uint8")}, {"page_tokens": 4}]
)
def test_b27_group_layout_and_span_are_in_the_key(change: dict[str, object]) -> None:
    digest = Prefix([1] * 8, 8).at(8)
    assert page_key(digest, group()) != page_key(digest, group(**{"page": 8, **change}))  # type: ignore[arg-type]


def test_b27_root_is_unambiguous() -> None:
    """Namespace, salt and the tokens behind them cannot be shifted into one another."""
    names = ["", "a", "aa", "a\0", "\0", "ä"]
    roots = [root(x, y) for x in names for y in names]
    assert len(set(roots)) == len(roots)
    assert not any(a != b and b.startswith(a) for a in roots for b in roots)


def test_b27_tenants_do_not_meet() -> None:
    groups = (group(4),)
    kv = KVManager(CacheSizes(groups=groups, pages=(9,), slots=2), namespace="m")
    tokens = list(range(12))
    mine = kv.prefix(tokens, "me")
    account, _ = kv.open(0, mine, kv.match(mine, 12))
    kv.reserve(account, 12)
    kv.commit(account, 12)
    assert kv.match(kv.prefix(tokens, "me"), 12).tokens == 8
    assert kv.match(kv.prefix(tokens, "you"), 12).tokens == 0


def test_digest_needs_known_tokens() -> None:
    with pytest.raises(IndexError):
        Prefix([1, 2, 3], 4).at(4)
