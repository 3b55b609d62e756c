"""A model that drafts behind chunks whose rows ranks share.

Each rank lets it read its own rows, over the caches as the chunk's other layers see them. From the
ends of prompts on, whoever computed them, the ranks of a request's domain go on as behind any other
step: what was left of those few rows is gathered. The id that follows a run is known to its domain
alone, and is gathered before, where there are several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metainfer.comm.peers import Peers
from metainfer.core.step import RunResult, Segment
from metainfer.executor.domains import drafting_rows
from metainfer.executor.model_drafts import (
    DraftStarts,
    DraftStep,
    Ints,
    ModelDrafts,
    asking_runs,
    forget,
    keep,
)
from metainfer.executor.slots import SlotTable
from metainfer.executor.spread import Rows
from metainfer.executor.transfer import to_device
from metainfer.kernels.table import PhaseOps
from metainfer.models.common.inputs import SegmentInputs


@dataclass(frozen=True, slots=True)
class Computed:
    """One rank's rows of a chunk: which, what the model was given of them, and what it left."""

    rows: Rows
    inputs: SegmentInputs
    hidden: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDrafts:
    """`reader` drafts over the model of chunks, `drafter` over that of decodes; they have one
    cache. `peers` share the rows. `moved`: bytes that came from others (``drafts``)."""

    reader: ModelDrafts
    drafter: ModelDrafts
    peers: Peers
    device: torch.device
    moved: Counter[str]

    def propose(
        self,
        segment: Segment,
        chunk: Computed,
        results: Sequence[RunResult],
        table: SlotTable,
        ops: PhaseOps,
    ) -> None:
        """As `model_drafts.propose`; `results` are of the runs of this rank's domain."""
        rows, next_ids = chunk.rows, self._next_ids(chunk.rows, table)
        left = self.reader.read(
            DraftStep(inputs=chunk.inputs, hidden=chunk.hidden, next_ids=next_ids, ops=ops)
        )
        own = [each.run for each in rows.runs if each.own]
        forget(own, table)
        ends = [n for n, each in enumerate(rows.runs) if each.run.proposals]
        if not ends:  # on no rank
            return
        mine, places = rows.given(rows.starts[1:][ends] - 1)
        gathered = self._gather(left[to_device(mine, self.device)])  # [ranks * m, ...]
        asking = asking_runs(own, results)
        place_of = dict(zip(ends, places.tolist(), strict=True))
        places_of_own = [place_of.get(n, 0) for n, each in enumerate(rows.runs) if each.own]
        runs = [own[n] for n in asking]
        slots = [run.slot for run in runs]
        starts = DraftStarts(
            left=gathered[self._numbers([places_of_own[n] for n in asking])],
            positions=self._numbers([run.end - 1 for run in runs]),
            pages=to_device(table.page_tables[self.drafter.group][slots], self.device),
            wanted=tuple(run.proposals for run in runs),
            ops=ops,
            level=drafting_rows(segment.ranks),
        )
        keep(self.drafter, starts, slots, table)

    def _next_ids(self, rows: Rows, table: SlotTable) -> Ints:
        """The id after each of this rank's rows: the next of its run, or what follows the run."""
        follows = np.zeros(len(rows.runs), np.int64)
        for number, each in enumerate(rows.runs):
            if each.own:
                known = table.states[each.run.slot].tokens
                follows[number] = known[each.end] if each.end < len(known) else 0
        follows = rows.told(follows, lambda own: self._gather(self._numbers(own)).cpu().numpy())
        following = [
            [*each.run.tokens[1:], follow]
            for each, follow in zip(rows.runs, follows.tolist(), strict=True)
        ]
        return rows.padded(np.concatenate(following)[rows.begin : rows.end], 0)

    def _gather(self, rows: Tensor) -> Tensor:
        self.moved["drafts"] += (self.peers.size - 1) * rows.nbytes
        return self.peers.rows(rows)

    def _numbers(self, numbers: Sequence[int] | Ints) -> Tensor:
        return to_device(np.asarray(numbers, np.int64), self.device)
