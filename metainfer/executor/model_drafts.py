"""A model that drafts beside the target (ADR 0010): what it is shown of each segment, and where
its proposals go. They stay with their slots, and the next plan names them by placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.core.step import RankTokens, RunResult, TokenRun
from metainfer.executor.slots import SlotTable
from metainfer.executor.transfer import to_device
from metainfer.kernels.table import PhaseOps
from metainfer.models.common.inputs import SegmentInputs

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep:
    """What a segment leaves to a model that drafts, of the T rows that are computed here (padding
    included).

    `hidden` is what the target's `forward` returned. `next_ids` int64 [T]: the id after each row's
    token; 0 in rows of rejected drafts, of padding, and at the end of a run that drew nothing. A
    drafter that keeps a cache writes its entries for all other rows; those of rejected ones are
    written again by the next run, so writing them is harmless.
    """

    inputs: SegmentInputs
    hidden: Any
    next_ids: Ints
    ops: PhaseOps


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStarts:
    """Where a model that drafts goes on: the S runs that want proposals.

    `left` [S, ...]: what `read` left of the row whose successor was drawn, which stands at
    `positions` int64 [S]. `pages` [S, W]: of the drafter's cache group; they exist for
    ``wanted - 1`` positions further on. `wanted`: how many each wants, at least one. `level`: rows
    of each further step, the same on all ranks that meet in it; empty: as many as want one.
    """

    left: Tensor
    positions: Tensor
    pages: Tensor
    wanted: tuple[int, ...]
    ops: PhaseOps
    level: tuple[int, ...] = ()


class ModelDrafts(Protocol):
    """A model that drafts beside the target, such as a multi-token-prediction block. `group`: the
    cache group that it keeps its entries in."""

    @property
    def group(self) -> int: ...

    def read(self, step: DraftStep) -> Tensor:
        """What the drafter makes of each row [T, ...], for `propose` to go on from.

        Called after every segment, also where nothing is wanted: it fills the drafter's cache.
        """
        ...

    def propose(self, starts: DraftStarts) -> Sequence[Sequence[int]]:
        """For each run exactly as many ids as it wants: guesses for what follows the one drawn."""
        ...


def propose(
    drafter: ModelDrafts,
    hidden: Any,
    inputs: SegmentInputs,
    rank: RankTokens,
    results: Sequence[RunResult],
    table: SlotTable,
    ops: PhaseOps,
) -> None:
    """Let `drafter` see a finished segment, and keep its proposals with their slots.

    Raises:
        InternalError: it proposed more or fewer than was asked for.
    """
    runs, device = rank.runs, inputs.ids.device
    next_ids = np.zeros(inputs.ids.shape[0], np.int64)
    last_rows, at = [], 0
    for run in runs:
        following = table.states[run.slot].tokens[run.start + 1 : run.end + 1]
        next_ids[at : at + len(following)] = following
        last_rows.append(at + len(following) - 1)
        at += len(run.tokens)
    left = drafter.read(DraftStep(inputs=inputs, hidden=hidden, next_ids=next_ids, ops=ops))
    forget(runs, table)
    asking = asking_runs(runs, results)
    if not asking and not rank.drafting:
        return
    numbers = to_device(np.array(asking, np.int64), device)
    rows = to_device(np.array([last_rows[n] for n in asking], np.int64), device)
    starts = DraftStarts(
        left=left[rows],
        positions=inputs.positions[rows],
        pages=inputs.groups[drafter.group].pages[numbers],
        wanted=tuple(runs[n].proposals for n in asking),
        ops=ops,
        level=rank.drafting,
    )
    keep(drafter, starts, [runs[n].slot for n in asking], table)


def asking_runs(runs: Sequence[TokenRun], results: Sequence[RunResult]) -> list[int]:
    """Numbers of the runs that want proposals; a broken one does not any more."""
    every = enumerate(zip(runs, results, strict=True))
    return [n for n, (run, result) in every if run.proposals and not result.error]


def forget(runs: Sequence[TokenRun], table: SlotTable) -> None:
    """What was proposed behind an earlier run is used up."""
    for run in runs:
        table.states[run.slot].proposals = []


def keep(drafter: ModelDrafts, starts: DraftStarts, slots: Sequence[int], table: SlotTable) -> None:
    """What `drafter` proposes from `starts` on, with their `slots`.

    Raises:
        InternalError: it proposed more or fewer than was asked for.
    """
    made = drafter.propose(starts)
    for slot, count, tokens in zip(slots, starts.wanted, made, strict=True):
        if len(tokens) != count:
            raise InternalError(f"{len(tokens)} proposals were made, {count} asked for")
        table.states[slot].proposals = list(tokens)
