"""A step whose shapes are fixed: what the host writes for it, and the rest computed on the device.

The host writes ids, and slot, first position and length of each run: a few numbers, in one copy.
Positions, places in every cache group, page tables and lengths follow on the device from the page
tables of all slots, so that a captured step needs nothing else. A step of a bucket of T tokens and
S runs is padded: unused runs belong to a spare slot, whose pages are all page 0, which no request
owns. In decode each of them is one token that writes nothing; elsewhere it has no token, and the
tokens behind the last run belong to none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metainfer.core.plan import StepGraph
from metainfer.core.step import NO_ADAPTER, PENDING, Phase, StepPlan, TokenRun
from metainfer.executor.slots import SlotTable
from metainfer.executor.transfer import staged, to_device
from metainfer.kv.book.spec import GroupKind, GroupSpec
from metainfer.models.common.inputs import GroupInputs, SegmentInputs
from metainfer.ops.common import owners
from metainfer.ops.lora.rows import AdapterRows

Ints = npt.NDArray[np.int64]


class DeviceTables:
    """The tables of all slots on the device, kept current by the plans' diffs.

    `pages` [slots + 1, W] int32 for each group (W = 0 for states), columns of one table; `latest`
    int64 [slots + 1], the token drawn last. The last line is the spare slot's.
    """

    def __init__(self, table: SlotTable, device: torch.device) -> None:
        self.spare = table.slots
        widths = [pages.shape[1] for pages in table.page_tables]
        self._first = [sum(widths[:group]) for group in range(len(widths))]
        self._lines = torch.full(
            (table.slots + 1, sum(widths)), -1, dtype=torch.int32, device=device
        )
        self._lines[-1] = 0
        self.pages = torch.split(self._lines, widths, dim=1)
        numbers = [
            (
                self._first[group.index],
                group.page_tokens,
                group.tokens_per_entry,
                group.rank_entries,
                group.shards,
                group.part,
            )
            for group in table.groups
            if group.kind is not GroupKind.STATE
        ]
        # [6, P, 1]: first column, tokens of a page, tokens of an entry, a rank's entries of a page,
        # ranks that share it, which of them this is
        grid = np.array(numbers, np.int64).reshape(-1, 6).T[:, :, None]
        self._dealt = any(group.shards > 1 for group in table.groups)
        self._grid = torch.from_numpy(grid.copy()).to(device)
        self.latest = torch.zeros(table.slots + 1, dtype=torch.int64, device=device)

    def note(self, runs: Sequence[TokenRun], drawn: Tensor) -> None:
        """`drawn` int64: the tokens of those of `runs` that sample, one each."""
        slots = np.array([run.slot for run in runs if run.samples], np.int64)
        self.latest.index_copy_(0, to_device(slots, drawn.device), drawn)

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan's diff: empty lines for who enters, then the pages granted."""
        device, width = self.latest.device, self._lines.shape[1]
        if plan.new:
            entered = np.array([new.slot for new in plan.new], np.int64)
            self._lines.index_fill_(0, to_device(entered, device), -1)
        where, pages = list[int](), list[int]()
        for grant in plan.pages:
            first = grant.slot * width + self._first[grant.group] + grant.first
            where += range(first, first + len(grant.pages))
            pages += grant.pages
        if pages:
            places, values = to_device(np.array([where, pages], np.int64), device)
            self._lines.view(-1).index_copy_(0, places, values.int())

    def places(self, owner: Tensor, positions: Tensor) -> Tensor:
        """int64 [P, T] for the P groups with pages: where each token writes, its own entry or the
        compressed one that it closes; -1 for none, and where another rank holds it. `owner`,
        `positions` [T]: the slot of each token and its position. All groups in the same few
        launches."""
        first, span, ratio, entries, shards, part = self._grid
        where = owner * self._lines.shape[1] + first + positions // span
        page = self._lines.view(-1).index_select(0, where.view(-1)).view_as(where).long()
        entry, none = positions % span // ratio, positions % ratio != ratio - 1
        if self._dealt:
            none |= entry % shards != part
            entry //= shards
        places = torch.addcmul(entry, page, entries)
        return places.masked_fill_(none | (page < 0) | (owner >= self.spare), -1)


@dataclass(slots=True)
class StepBuffers:
    """What the host writes. `numbers` holds all of it; the rest are views, int64.

    `ids` [T], `PENDING` for the slot's latest token; `slots`, `starts`, `lengths` [S]; `adapters`
    [T], their places, None where the model has none.
    """

    numbers: Tensor
    ids: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    adapters: Tensor | None

    @staticmethod
    def make(shape: StepGraph, device: torch.device, *, adapters: bool) -> StepBuffers:
        parts = [shape.tokens, *[shape.runs] * 3, *[shape.tokens] * adapters]
        numbers = torch.zeros(sum(parts), dtype=torch.int64, device=device)
        ids, slots, starts, lengths, *places = torch.split(numbers, parts)
        return StepBuffers(numbers, ids, slots, starts, lengths, places[0] if places else None)

    def fill(self, ids: Ints, runs: Sequence[tuple[int, int, int]], spare: int, one: bool) -> None:
        """Write a step of `runs` (slot, start, length) over `ids`; the rest becomes padding.

        `one`: a padding run is one token, as in decode.
        """
        tokens, count = self.ids.shape[0], self.slots.shape[0]
        new = np.zeros(self.numbers.shape[0], np.int64)
        new[: len(ids)] = ids
        slots, starts, lengths = new[tokens : tokens + 3 * count].reshape(3, count)
        slots[:], lengths[:] = spare, int(one)
        if runs:
            slots[: len(runs)], starts[: len(runs)], lengths[: len(runs)] = zip(*runs, strict=True)
        if self.adapters is not None:
            new[tokens + 3 * count :] = NO_ADAPTER
        self.numbers.copy_(staged(new, self.numbers.device), non_blocking=True)

    def fill_adapters(self, places: Ints | None) -> None:
        """Write the place of each token's adapter; None where no run has one. After `fill`."""
        if self.adapters is not None and places is not None:
            target = self.adapters[: len(places)]
            target.copy_(staged(places, target.device), non_blocking=True)


def step_inputs(
    shape: StepGraph, buffers: StepBuffers, tables: DeviceTables, groups: Sequence[GroupSpec]
) -> SegmentInputs:
    """What a model reads, from buffers and tables alone: no value comes to the host."""
    slots, starts, lengths = buffers.slots, buffers.starts, buffers.lengths
    one = shape.phase == Phase.DECODE.value
    if one:  # a padding run has a token, too
        query_start = torch.arange(shape.runs + 1, dtype=torch.int32, device=slots.device)
        positions, owner, contexts = starts, slots, starts + 1
    else:
        at = torch.arange(shape.tokens, device=slots.device)
        ends = lengths.cumsum(0)
        query_start = torch.cat((ends.new_zeros(1), ends)).int()
        sequence, real = owners(query_start, shape.tokens)
        within = at - query_start.long().index_select(0, sequence)
        positions = torch.where(real, starts.index_select(0, sequence) + within, 0)
        owner = torch.where(real, slots.index_select(0, sequence), tables.spare)
        contexts = torch.where(lengths > 0, starts + lengths, 1)
    ids = torch.where(buffers.ids == PENDING, tables.latest.index_select(0, owner), buffers.ids)
    places = iter(tables.places(owner, positions))
    found = [
        GroupInputs(None, slots)
        if group.kind is GroupKind.STATE
        else GroupInputs(pages.index_select(0, slots), next(places))  # [S, W], [T]
        for group, pages in zip(groups, tables.pages, strict=True)
    ]
    every = one or shape.phase == Phase.VERIFY.value
    last = None if every else (query_start[1:].long() - 1).clamp_min(0)
    rows = None if buffers.adapters is None else AdapterRows(buffers.adapters)
    return SegmentInputs(ids, positions, query_start, contexts.int(), tuple(found), last, rows)
