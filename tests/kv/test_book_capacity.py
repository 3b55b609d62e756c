"""What fits, limits and advice (B-20, B-21, B-28)."""

from __future__ import annotations

import random
from dataclasses import replace

from metainfer.core.plan import Limits
from metainfer.kv.book.capacity import (
    CacheSizes,
    check_limits,
    fits,
    longest,
    steady_pages,
)
from metainfer.kv.book.form import plain
from metainfer.kv.book.manager import KVManager
from metainfer.kv.book.spec import CacheSpec, GroupKind, GroupSpec, form_groups, hit_grid


def groups(window: int = 10, ratio: int = 4, page: int = 8) -> tuple[GroupSpec, ...]:
    def make(kind: GroupKind, name: str, **more: int) -> CacheSpec:
        form = plain("l", more.pop("bytes", 2), "uint8")
        return CacheSpec(layer=0, name=name, kind=kind, form=form, **more)  # type: ignore[arg-type]

    return form_groups(
        (
            make(GroupKind.PAGED, "kv"),
            make(GroupKind.PAGED, "c", tokens_per_entry=ratio),
            make(GroupKind.WINDOW, "swa", window=window),
            make(GroupKind.STATE, "s", bytes=64, rows=1),
        ),
        page_tokens=page,
    )


def sizes(*pages: int, slots: int = 4) -> CacheSizes:
    return CacheSizes(groups=groups(), pages=(*pages, 0), slots=slots)


def limits(context: int, running: int) -> Limits:
    return Limits(
        max_context=context,
        max_running=running,
        step_tokens=64,
        mixed_prefill_tokens=8,
        max_waiting=8,
    )


def test_longest_is_the_border_of_fits() -> None:
    draw = random.Random("longest")
    for _ in range(300):
        case = sizes(*(draw.randrange(0, 12) for _ in range(3)))
        most = longest(case)
        assert most == 0 or fits(case, most).accepted
        assert most == 2**31 - 1 or not fits(case, most + 1).accepted


def test_b28_a_lone_sequence_reaches_what_fits_promises() -> None:
    """One token at a time, with a result outstanding, in exactly the pages that `fits` counts."""
    case = sizes(7, 7, 1 + groups()[2].live_pages(1000))
    kv = KVManager(case)
    most = longest(case)
    account, _ = kv.open(0, kv.prefix(list(range(most)), ""), kv.match(kv.prefix([1], ""), 1))
    for end in range(1, most + 1):
        assert not hasattr(kv.reserve(account, end), "reasons"), end
        if end > 1:
            kv.commit(account, end - 1)


def test_b20_limits_are_refused_with_every_reason() -> None:
    verdict = check_limits(sizes(3, 9, 9), limits(100, 9))
    texts = [reason.message for reason in verdict.reasons]
    assert texts == [
        "100 tokens need 13 pages of group kv, the pool has 2",
        "100 tokens need 13 pages of group c-1of4, the pool has 8",
        "9 running sequences asked, caches allow 2",
    ]


def test_b21_slots_limit_running_sequences() -> None:
    roomy = sizes(50, 50, 50, slots=2)
    assert check_limits(roomy, limits(8, 2)).accepted
    refused = check_limits(roomy, limits(8, 3))
    assert refused.reasons[0].data == {"asked": 3, "allowed": 2}


def test_b20_bytes_follow_the_groups() -> None:
    case = sizes(3, 5, 7)
    assert case.bytes() == 3 * 16 + 5 * 4 + 7 * 16 + (4 + 1) * 64
    assert replace(case, slots=5).bytes() - case.bytes() == 64


def test_steady_pages_never_block() -> None:
    """With the advised window pages every slot can hold its window while a full chunk runs."""
    swa = groups()[2]
    rows = steady_pages(swa, tokens=500, slots=3, step_tokens=40)
    assert rows - 1 >= 3 * swa.live_pages(500) + swa.pages_for(40)


def test_hit_grid_covers_clean_and_saved_states() -> None:
    made = groups()
    assert hit_grid(made) == 8
    clean = replace(made[3], snapshot_tokens=0, clean_tokens=12)
    assert hit_grid((*made[:3], clean)) == 24
    assert made[3].snapshot_tokens == 8, "a state that is nowhere clean is saved on the page grid"
