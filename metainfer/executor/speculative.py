"""Drafts on the device's side: what a run's drafts are, and which are accepted.

The n-gram drafter lives in the scheduler; its drafts arrive as ids. Those of a model
(`model_drafts`) stay with their slot, and the next plan names them by placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from metainfer.core.errors import InternalError
from metainfer.core.step import PENDING, TokenRun

if TYPE_CHECKING:
    from metainfer.executor.slots import SlotState


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
