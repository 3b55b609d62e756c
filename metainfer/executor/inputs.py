"""From a segment of a step plan to the tensors that a model reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from metainfer.core.errors import InternalError
from metainfer.core.step import NO_ADAPTER, PENDING, RankTokens, TokenRun
from metainfer.executor.slots import SlotTable
from metainfer.executor.speculative import drafts_of
from metainfer.executor.transfer import to_device
from metainfer.kv.book.spec import GroupKind, GroupSpec
from metainfer.models.common.inputs import GroupInputs, SegmentInputs
from metainfer.ops.lora.rows import AdapterRows, groups_of

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class HostInputs:
    """A segment as numpy arrays; `SegmentInputs` says what each means.

    Padding tokens have id 0, position 0 and slot -1, and belong to no sequence.
    `adapters`: the place of each token's adapter, None where no run has one.
    """

    ids: Ints
    positions: Ints
    query_start: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    page_tables: list[npt.NDArray[np.int32] | None]
    slots: list[Ints]
    logit_rows: Ints
    adapters: Ints | None = None

    def to(self, device: torch.device) -> SegmentInputs:
        """Copy to `device`; on CPU the arrays are shared, not copied."""

        def move(array: npt.NDArray[Any]) -> torch.Tensor:
            return to_device(array, device)

        groups = tuple(
            GroupInputs(None if table is None else move(table), move(slots))
            for table, slots in zip(self.page_tables, self.slots, strict=True)
        )
        return SegmentInputs(
            move(self.ids),
            move(self.positions),
            move(self.query_start),
            move(self.context_lens),
            groups,
            None if self.every_row else move(self.logit_rows),
            None if self.adapters is None else adapter_rows(self.adapters, move),
        )

    @property
    def every_row(self) -> bool:
        """Whether each token's row needs logits."""
        return len(self.logit_rows) == len(self.ids)


def build(rank: RankTokens, table: SlotTable, groups: Sequence[GroupSpec]) -> HostInputs:
    """Inputs of one rank's part of a segment. `PENDING` ids are the slot's latest token.

    Raises:
        InternalError: one of them was not read yet.
    """
    runs = rank.runs
    lengths = np.fromiter((len(run.tokens) for run in runs), np.int64, len(runs))
    starts = np.fromiter((run.start for run in runs), np.int64, len(runs))
    slot_of = np.fromiter((run.slot for run in runs), np.int64, len(runs))
    real = int(lengths.sum())
    total = real + rank.padding
    query_start = np.zeros(len(runs) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    positions = np.zeros(total, np.int64)
    within = np.arange(real) - np.repeat(query_start[:-1].astype(np.int64), lengths)
    positions[:real] = np.repeat(starts, lengths) + within
    token_slot = np.repeat(slot_of, lengths)
    contexts = (starts + lengths).astype(np.int32)
    # A model that drafts goes on from here, up to one place before its last proposal.
    ahead = np.fromiter((run.proposals for run in runs), np.int64, len(runs))
    longest = int((contexts + ahead).max(initial=1))
    tables: list[npt.NDArray[np.int32] | None] = []
    slots = []
    for group, pages in zip(groups, table.page_tables, strict=True):
        if group.kind is GroupKind.STATE:
            tables.append(None)
            slots.append(slot_of)
            continue
        tables.append(np.ascontiguousarray(pages[slot_of, : group.pages_for(longest)]))
        entry = np.full(total, -1, np.int64)
        entry[:real] = _entries(group, pages, token_slot, positions[:real])
        slots.append(entry)
    ids = np.zeros(total, np.int64)
    ids[:real] = step_ids(runs, table)
    if PENDING in ids:
        raise InternalError("an id is on the device alone, and the step is built on the host")
    places = adapter_places(runs, table)
    return HostInputs(
        ids,
        positions,
        query_start,
        contexts,
        tables,
        slots,
        _logit_rows(runs, query_start),
        None if places is None else np.pad(places, (0, rank.padding), constant_values=NO_ADAPTER),
    )


def adapter_places(runs: Sequence[TokenRun], table: SlotTable) -> Ints | None:
    """The place of each token's adapter; None where no run has one."""
    places = [table.states[run.slot].adapter for run in runs]
    if all(place == NO_ADAPTER for place in places):
        return None
    return np.repeat(np.array(places, np.int64), [len(run.tokens) for run in runs])


def adapter_rows(places: Ints, move: Callable[[Ints], torch.Tensor]) -> AdapterRows:
    """The same on the device, sorted by adapter while the host knows them."""
    groups = groups_of(torch.from_numpy(places))
    moved = tuple(
        (place, rows if isinstance(rows, slice) else move(rows.numpy())) for place, rows in groups
    )
    return AdapterRows(move(places), moved)


def _entries(
    group: GroupSpec, pages: npt.NDArray[np.int32], token_slot: Ints, positions: Ints
) -> Ints:
    """Where each token writes: its own entry, or the compressed one that it closes; else -1, as
    where another rank holds the entry."""
    span, ratio = group.page_tokens, group.tokens_per_entry
    page = pages[token_slot, positions // span].astype(np.int64)
    entry = positions % span // ratio
    place = page * group.rank_entries + entry // group.shards
    own = (page >= 0) & ((positions + 1) % ratio == 0) & (entry % group.shards == group.part)
    return np.where(own, place, -1)


def step_ids(runs: Sequence[TokenRun], table: SlotTable) -> Ints:
    """The ids of all tokens of `runs`, what the slots know in place of `PENDING`.

    `PENDING` stays where the slot's latest draw was not read yet.
    """
    ids: list[int] = []
    for run in runs:
        at = len(ids)
        ids += run.tokens
        if run.tokens[0] == PENDING and run.start < len(known := table.states[run.slot].tokens):
            ids[at] = known[run.start]
        if run.drafts:
            ids[-run.drafts :] = drafts_of(run, table.states[run.slot])
    return np.array(ids, np.int64)


def _logit_rows(runs: Sequence[TokenRun], query_start: npt.NDArray[np.int32]) -> Ints:
    rows = [
        np.arange(query_start[i + 1] - run.logits, query_start[i + 1])
        for i, run in enumerate(runs)
        if run.logits
    ]
    return np.concatenate(rows).astype(np.int64) if rows else np.zeros(0, np.int64)
