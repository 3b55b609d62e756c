"""Drafts on the device's side: what a run's drafts are, which are accepted, who proposes the next.

The n-gram drafter lives in the scheduler; its drafts arrive as ids. A model that drafts (ADR 0010)
runs here after each segment: what it proposes for a slot stays with the slot, and the next plan
names it by placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from metainfer.core.errors import InternalError
from metainfer.core.step import PENDING, RunResult, TokenRun

if TYPE_CHECKING:
    from torch import Tensor

    from metainfer.executor.slots import SlotState, SlotTable
    from metainfer.kernels.table import PhaseOps
    from metainfer.models.common.inputs import SegmentInputs


class Grammar(Protocol):
    """Which ids may come next in one request. Speculation asks about places it may never reach.

    It belongs to a slot's state: a request that re-enters gets a new one, which has to be told
    what was generated before.
    """

    def allowed(self, ahead: Sequence[int]) -> npt.NDArray[np.bool_]:
        """bool [V]: what may follow everything accepted and then `ahead`.

        `ahead` may be what the grammar itself forbids: then any answer is right, since a row behind
        a forbidden draft is never used. All False where nothing may follow.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """These were drawn, and stay."""
        ...

    @property
    def fault(self) -> str:
        """Why it can no longer be followed, or empty; the request then ends with it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep:
    """What a segment leaves to a model that drafts. T tokens (padding included), one entry per run.

    `hidden` is what the target's `forward` returned. `next_ids` int64 [T]: the id after each row's
    token; 0 in rows of rejected drafts, of padding, and at the end of a run that drew nothing. A
    drafter that keeps a cache writes its entries for all other rows; those of rejected ones are
    written again by the next run, so writing them is harmless. `last_rows` int64 [runs]: the row
    whose successor was drawn, -1 where none was. `wanted`: how many proposals each run asks for;
    pages exist for ``wanted - 1`` positions beyond the run's end.
    """

    inputs: SegmentInputs
    hidden: Tensor
    runs: Sequence[TokenRun]
    next_ids: npt.NDArray[np.int64]
    last_rows: npt.NDArray[np.int64]
    wanted: tuple[int, ...]
    ops: PhaseOps


class ModelDrafts(Protocol):
    """A model that drafts beside the target, such as a multi-token-prediction block."""

    def propose(self, step: DraftStep) -> Sequence[Sequence[int]]:
        """For each run exactly as many ids as it wants: guesses for what follows `last_rows`.

        Called after every segment, also where nothing is wanted: a drafter with a cache fills it.
        """
        ...


def drafts_of(run: TokenRun, state: SlotState) -> tuple[int, ...]:
    """The ids of a run's drafts, the slot's own proposals in place of placeholders.

    Raises:
        InternalError: a placeholder for which nothing was proposed.
    """
    drafts = run.tokens[len(run.tokens) - run.drafts :]
    if PENDING not in drafts:
        return drafts
    if len(state.proposals) < len(drafts):
        raise InternalError(
            f"slot {run.slot} holds {len(state.proposals)} proposals, {len(drafts)} are asked for"
        )
    mixed = zip(drafts, state.proposals, strict=False)
    return tuple(own if token == PENDING else token for token, own in mixed)


def accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many drafts the target drew itself.

    Row i of a verify run draws with the uniform number of its own index, as a run of one token at
    that place would: a drafter that is certain of its token is a point mass, for which accepting
    what was drawn anyway *is* rejection sampling without a second draw. So drafts change no token.
    """
    count = 0
    while count < len(drafts) and drawn[count] == drafts[count]:
        count += 1
    return count


def propose(
    drafter: ModelDrafts,
    hidden: Tensor,
    inputs: SegmentInputs,
    runs: Sequence[TokenRun],
    results: Sequence[RunResult],
    table: SlotTable,
    ops: PhaseOps,
) -> None:
    """Let `drafter` see a finished segment, and keep its proposals with their slots.

    Raises:
        InternalError: it proposed more or fewer than was asked for.
    """
    next_ids = np.zeros(inputs.ids.shape[0], np.int64)
    last_rows = np.full(len(runs), -1, np.int64)
    wanted = tuple(
        0 if result.error else run.proposals for run, result in zip(runs, results, strict=True)
    )
    at = 0
    for number, (run, result) in enumerate(zip(runs, results, strict=True)):
        following = table.states[run.slot].tokens[run.start + 1 : run.end + 1]
        next_ids[at : at + len(following)] = following
        if result.tokens:
            last_rows[number] = at + len(following) - 1
        at += len(run.tokens)
    made = drafter.propose(
        DraftStep(
            inputs=inputs,
            hidden=hidden,
            runs=runs,
            next_ids=next_ids,
            last_rows=last_rows,
            wanted=wanted,
            ops=ops,
        )
    )
    for run, count, tokens in zip(runs, wanted, made, strict=True):
        if len(tokens) != count:
            raise InternalError(f"{len(tokens)} proposals were made, {count} asked for")
        table.states[run.slot].proposals = list(tokens)
