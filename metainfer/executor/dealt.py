"""Chunks of prompts over a cache that is dealt over ranks, where each rank computes all rows.

Every rank writes a chunk's entries by itself. What lies before them is gathered from the parts, a
layer at a time, into a copy of which each rank keeps its own part (`models.common.spread`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from metainfer.comm.peers import ALONE, Peers, Ranks
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Segment
from metainfer.executor.slots import SlotTable
from metainfer.executor.spread import Keeping, Rows, nothing, tables
from metainfer.executor.transfer import to_device
from metainfer.kv.book.spec import GroupSpec
from metainfer.models.common.inputs import GroupInputs, SegmentInputs
from metainfer.models.common.spread import Spread


@dataclass(frozen=True, slots=True)
class DealtChunks:
    """`groups`: as this rank holds them; `peers`: the ranks that hold parts; `moved`: bytes that
    this rank received (``past``)."""

    groups: Sequence[GroupSpec]
    peers: Peers
    device: torch.device
    moved: Counter[str]

    def over_copies(
        self, inputs: SegmentInputs, segment: Segment, slots: SlotTable
    ) -> SegmentInputs:
        """`inputs` of one rank's chunks, reading and writing copies of what is dealt."""
        rows = Rows(segment, 0, 1, 0)
        if rows.runs:
            found = tables(rows, self.groups, slots, Keeping.EVERYWHERE)
            exchanged = [each.of_part(0, 0, Keeping.EVERYWHERE, self.device) for *_, each in found]
        else:  # padding alone
            exchanged = [nothing(group).of_part(0, 0, Keeping.EVERYWHERE, self.device)
                         for group in self.groups]  # fmt: skip
        groups = list(inputs.groups)
        for number, group in enumerate(self.groups):
            if group.shards == 1:
                continue
            tokens = inputs.ids.shape[0]
            where, pages = np.full(tokens, -1, np.int64), inputs.groups[number].page_table
            if rows.runs:
                table, own, _ = found[number]
                assert table is not None
                where[: rows.total], pages = own, to_device(table, self.device)
            groups[number] = GroupInputs(pages, to_device(where, self.device))
        spread = Spread(ALONE, [exchanged], self.moved, self.peers)
        return replace(inputs, groups=tuple(groups), spread=spread)


def own_parts(groups: Sequence[GroupSpec], ranks: Ranks) -> tuple[GroupSpec, ...]:
    """`groups` as this rank holds them: of what is dealt, its part."""
    part = ranks.shards.rank
    return tuple(replace(group, part=part) if group.shards > 1 else group for group in groups)


def dealt_chunks(
    model: Any,
    groups: Sequence[GroupSpec],
    layout: LayoutPlan,
    ranks: Ranks,
    device: torch.device,
) -> DealtChunks | None:
    """What chunks of `model` read over a dealt cache, where ranks do not share their rows too."""
    if layout.shards == 1 or layout.prefill > 1:
        return None
    return DealtChunks(groups, ranks.shards, device, model.dealt.moved)
