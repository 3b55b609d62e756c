"""What a captured step computes on the device is what the host builds for the same runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.plan import StepGraph
from metainfer.core.request import SamplingParams
from metainfer.core.step import PENDING, NewRequest, PageGrant, RankTokens, StepPlan, TokenRun
from metainfer.executor.inputs import build, step_ids
from metainfer.executor.slots import SlotTable
from metainfer.executor.static import DeviceTables, StepBuffers, step_inputs
from metainfer.executor.transfer import to_host
from metainfer.kv.book.form import latent_plain, plain
from metainfer.kv.book.spec import CacheSpec, GroupKind, GroupSpec, form_groups

SLOTS, CONTEXT, PAGE = 5, 256, 32
CPU = torch.device("cpu")


def spec(name: str, kind: GroupKind, **more: object) -> CacheSpec:
    form = (
        plain("rows@1", 8, "float32", parts=2) if "rows" in more else latent_plain(8, 4, "float32")
    )
    return CacheSpec(layer=0, name=name, kind=kind, form=form, **more)  # type: ignore[arg-type]


GROUPS = form_groups(
    (
        spec("local", GroupKind.WINDOW, window=24, page_tokens=16),
        spec("csa", GroupKind.PAGED, tokens_per_entry=4),
        spec("hca", GroupKind.PAGED, tokens_per_entry=16),
        spec("state", GroupKind.STATE, rows=16),
    ),
    page_tokens=PAGE,
)

#: As the second of two ranks holds them, where entries of whole sequences are dealt.
DEALT = tuple(
    replace(group, shards=2, part=1) if group.kind is GroupKind.PAGED else group for group in GROUPS
)

runs_of = st.lists(
    st.tuples(st.integers(0, CONTEXT - 12), st.integers(1, 9)), min_size=1, max_size=SLOTS
)


def tables(
    seed: int, gone: float, groups: tuple[GroupSpec, ...] = GROUPS
) -> tuple[SlotTable, DeviceTables]:
    """Every slot with pages of its own; some were given back."""
    rng = np.random.default_rng(seed)
    host = SlotTable(groups, SLOTS, CONTEXT, 100)
    device = DeviceTables(host, CPU)
    params, grants = SamplingParams(), []
    new = [
        NewRequest(f"r{s}", s, 0, tuple(rng.integers(0, 99, CONTEXT).tolist()), 9, 0, params)
        for s in range(SLOTS)
    ]
    for group in groups:
        if group.kind is not GroupKind.STATE:
            width = group.pages_for(CONTEXT)
            pages = rng.permutation(np.arange(1, 1 + SLOTS * width)).reshape(SLOTS, width)
            pages = np.where(rng.random(pages.shape) < gone, -1, pages)
            grants += [PageGrant(s, group.index, 0, tuple(pages[s].tolist())) for s in range(SLOTS)]
    for plan in (StepPlan(0, (), tuple(new)), StepPlan(1, (), (), tuple(grants))):
        host.apply(plan)
        device.apply(plan)
    return host, device


@given(
    runs=runs_of,
    phase=st.sampled_from(["decode", "verify", "chunk", "mixed"]),
    spare=st.integers(0, 3),
    more=st.integers(0, 4),
    seed=st.integers(0, 99),
    gone=st.sampled_from([0.0, 0.3]),
    groups=st.sampled_from([GROUPS, DEALT]),
)
def test_the_device_computes_what_the_host_builds(
    runs: list[tuple[int, int]],
    phase: str,
    spare: int,
    more: int,
    seed: int,
    gone: float,
    groups: tuple[GroupSpec, ...],
) -> None:
    host, device = tables(seed, gone, groups)
    if phase == "decode":
        runs = [(start, 1) for start, _ in runs]
    listed = tuple(
        TokenRun(slot, start, (PENDING, *range(length - 1)), length, 0, True)
        for slot, (start, length) in enumerate(runs)
    )
    count = len(runs) + spare
    real = sum(length for _, length in runs)
    shape = StepGraph(phase=phase, tokens=count if phase == "decode" else real + more, runs=count)
    buffers = StepBuffers.make(shape, CPU, adapters=False)
    buffers.numbers.fill_(12345)  # what an earlier step left
    filled = [(run.slot, run.start, len(run.tokens)) for run in listed]
    buffers.fill(step_ids(listed, host), filled, device.spare, phase == "decode")
    mine = step_inputs(shape, buffers, device, groups)
    want = build(RankTokens(listed), host, groups).to(CPU)

    n = len(runs)
    assert torch.equal(mine.ids[:real], want.ids) and torch.equal(
        mine.positions[:real], want.positions
    )
    assert torch.equal(mine.query_start[: n + 1], want.query_start)
    assert torch.equal(mine.context_lens[:n], want.context_lens)
    assert (mine.ids[real:] == 0).all() and (mine.positions[real:] == 0).all()
    assert (mine.context_lens[n:] == 1).all()
    if phase in ("chunk", "mixed"):
        assert mine.logit_rows is not None
        assert torch.equal(mine.logit_rows[:n], want.query_start[1:].long() - 1)
    for group, ours, theirs in zip(groups, mine.groups, want.groups, strict=True):
        if group.kind is GroupKind.STATE:
            assert torch.equal(ours.slots[:n], theirs.slots)
            assert (ours.slots[n:] == SLOTS).all()  # the line of padding
            continue
        assert torch.equal(ours.slots[:real], theirs.slots)
        assert (ours.slots[real:] == -1).all()  # padding writes nothing
        assert torch.equal(ours.pages[:n, : theirs.pages.shape[1]], theirs.pages)
        assert (ours.pages[n:] == 0).all()


def test_a_pending_id_is_the_slots_latest_token() -> None:
    _, device = tables(1, 0.0)
    device.latest[:] = torch.tensor([50, 51, 52, 53, 54, 0])
    shape = StepGraph(phase="verify", tokens=6, runs=3)
    buffers = StepBuffers.make(shape, CPU, adapters=False)
    ids = np.array([PENDING, 7, PENDING], np.int64)
    buffers.fill(ids, [(3, 5, 2), (1, 9, 1)], device.spare, False)
    assert step_inputs(shape, buffers, device, GROUPS).ids.tolist() == [53, 7, 51, 0, 0, 0]


@pytest.mark.parametrize("slot", range(SLOTS))
def test_pages_of_the_spare_slot_stay(slot: int) -> None:
    host, device = tables(2, 0.0)
    device.apply(StepPlan(2, (), (), (PageGrant(slot, 0, 0, (9,)),)))
    for pages, group in zip(device.pages, GROUPS, strict=True):
        if group.kind is not GroupKind.STATE:
            assert (pages[-1] == 0).all()
    assert len(host.states) == SLOTS


@settings(max_examples=25)
@given(st.data())
def test_the_device_follows_every_plan(data: st.DataObject) -> None:
    """Grants as they come, and slots that change hands: no page of the one before stays."""
    host, device = tables(3, 0.0)
    widths = [pages.shape[1] for pages in host.page_tables]
    for step in range(2, 6):
        slots = data.draw(st.sets(st.integers(0, SLOTS - 1), max_size=3))
        new = tuple(NewRequest(f"{step}", s, 0, (1,), 1, 0, SamplingParams()) for s in slots)
        grants = []
        for slot in range(SLOTS):
            group = data.draw(st.sampled_from([g for g, width in enumerate(widths) if width]))
            first = data.draw(st.integers(0, widths[group] - 1))
            count = data.draw(st.integers(0, min(3, widths[group] - first)))
            grants.append(PageGrant(slot, group, first, tuple(range(40, 40 + count))))
        plan = StepPlan(step, (), new, tuple(grants), released=tuple(slots))
        host.apply(plan)
        device.apply(plan)
        for mine, theirs in zip(device.pages, host.page_tables, strict=True):
            assert torch.equal(mine[:-1], torch.from_numpy(theirs))


def test_a_copy_to_the_host_stays_what_it_was() -> None:
    """The next replay writes to the same place."""
    place = torch.arange(4)
    copy = to_host(place[1:])
    place.fill_(-5)
    assert copy.tolist() == [1, 2, 3]
