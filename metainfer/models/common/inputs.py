"""What a model's forward pass is given: tensors of one segment, and where its caches are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metainfer.models.common.spread import Spread
from metainfer.ops.lora.rows import AdapterRows


@dataclass(slots=True)
class GroupInputs:
    """How a segment's sequences stand in one KV group.

    `page_table` [S, W] int32 holds page ids (-1 outside the window); None for a slot state.
    `slots` int64: [T] ``page * entries + offset`` of the entry that each token writes, -1 where it
    writes none (padding, and tokens that do not close a compressed entry); for a slot state [S],
    the line of each sequence.
    """

    page_table: torch.Tensor | None
    slots: torch.Tensor

    @property
    def pages(self) -> torch.Tensor:
        """The page table of a group that has one."""
        assert self.page_table is not None
        return self.page_table


@dataclass(slots=True)
class SegmentInputs:
    """One segment. T tokens (padding included), S sequences, R rows that need logits.

    `spread`: ranks share the rows of the segment, and these are one rank's.
    """

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_start: torch.Tensor  # [S + 1] int32
    context_lens: torch.Tensor  # [S] int32, cached tokens including this segment's
    groups: tuple[GroupInputs, ...]
    logit_rows: torch.Tensor | None  # [R] int64; None = every row
    adapters: AdapterRows | None = None  # None: no row has one
    spread: Spread | None = None
