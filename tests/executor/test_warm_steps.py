"""A step that runs before ready: pages for all that it may write, adapters in turn, all lists."""

from __future__ import annotations

import pytest

from metainfer.core.step import NO_ADAPTER, Phase
from metainfer.executor.warmup import DRAWS, step_of
from metainfer.kv.book.form import plain
from metainfer.kv.book.spec import CacheSpec, GroupKind, form_groups

FORM = plain("kv@1", 8, "float32")
GROUPS = form_groups(
    (
        CacheSpec(layer=0, name="kv", kind=GroupKind.PAGED, form=FORM),
        CacheSpec(layer=0, name="local", kind=GroupKind.WINDOW, form=FORM, window=32),
        CacheSpec(layer=0, name="rows", kind=GroupKind.STATE, form=FORM, rows=4),
    ),
    page_tokens=16,
)


@pytest.mark.parametrize("proposals", [0, 1, 7])
@pytest.mark.parametrize("runs", [[(0, 1)], [(31, 1), (0, 33)], [(120, 4), (60, 4), (0, 1)]])
def test_pages_reach_as_far_as_drafts_and_the_context_go(
    runs: list[tuple[int, int]], proposals: int
) -> None:
    plan = step_of(
        Phase.DECODE,
        runs,
        DRAWS[0],
        groups=GROUPS,
        max_context=128,
        adapters=0,
        proposals=proposals,
        lists=1,
    )
    granted = {(grant.slot, grant.group): grant for grant in plan.pages}
    paged = [group for group in GROUPS if group.kind is not GroupKind.STATE]
    assert set(granted) == {(slot, group.index) for slot in range(len(runs)) for group in paged}
    (ranks,) = (segment.ranks for segment in plan.segments)
    for run in ranks[0].runs:
        last = run.end + run.proposals
        assert last <= 128
        for group in paged:
            grant = granted[run.slot, group.index]
            assert grant.first == 0 and not any(grant.pages)  # page 0 is nobody's
            assert 0 <= len(grant.pages) * group.page_tokens - last < group.page_tokens
    longest = max(start + length for start, length in runs)
    assert {run.proposals for run in ranks[0].runs} == {min(proposals, 128 - longest)}
    assert all(new.params == DRAWS[0] for new in plan.new)


@pytest.mark.parametrize(("adapters", "places"), [(0, [NO_ADAPTER] * 3), (2, [0, 1, 0])])
def test_adapters_take_turns_and_every_list_has_all_runs(adapters: int, places: list[int]) -> None:
    plan = step_of(
        Phase.VERIFY,
        [(0, 3), (8, 3), (0, 1)],
        DRAWS[1],
        groups=GROUPS,
        max_context=128,
        adapters=adapters,
        proposals=0,
        lists=2,
    )
    assert [new.adapter for new in plan.new] == places
    (segment,) = plan.segments
    assert len(segment.ranks) == 2 and segment.ranks[0] == segment.ranks[1]
    verified = [(run.drafts, run.logits) for run in segment.ranks[0].runs]
    assert verified == [(2, 3), (2, 3), (0, 1)]
