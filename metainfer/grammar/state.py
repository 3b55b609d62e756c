"""`GrammarState`: which ids may come next in one answer, reasoning before it included.

It is what the executor asks (`executor.speculative.Grammar`). A grammar that waits for the end of
reasoning lets everything through until then, except the ends and what only an answer may hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from metainfer.core.request import GrammarSpec
from metainfer.grammar.backend import DEAD_END, Compiled, Matcher, Vocabulary


class _Place(Enum):
    OPENING = 0  # nothing is written: the model may open reasoning, or begin
    REASONING = 1
    ANSWER = 2


class GrammarState:
    """One request's grammar. Not thread-safe."""

    __slots__ = (
        "_ended", "_fault", "_matcher", "_place", "_spec", "_tail",
        "_taken", "_vocabulary", "_words",
        "compiled",
    )  # fmt: skip

    def __init__(self, spec: GrammarSpec, compiled: Compiled, vocabulary: Vocabulary) -> None:
        self.compiled = compiled  # keeps it in the library while the request runs
        self._spec = spec
        self._matcher: Matcher = compiled.start()
        self._vocabulary = vocabulary
        self._words = np.zeros(-(-vocabulary.size // 32), np.int32)
        self._tail: tuple[int, ...] = ()
        self._taken: list[int] = []  # of the answer
        self._ended = False
        self._fault = ""
        self._place = _Place.ANSWER
        if spec.after:
            self._place = _Place.REASONING if spec.opening is None else _Place.OPENING

    @property
    def fault(self) -> str:
        """Why the grammar can no longer be followed, or empty."""
        return self._fault

    def accept(self, tokens: Sequence[int]) -> None:
        """`tokens` were drawn and stay; what follows an end is not looked at."""
        self._place, self._tail, answer = self._walk(tokens)
        if not answer or self._ended or self._fault:
            return
        used = self._matcher.consume(answer)
        self._taken += answer
        ends = self._vocabulary.ends
        self._ended = any(token in ends for token in answer)
        self._fault = self._matcher.fault
        if used < len(answer) and not self._ended and not self._fault:
            self._fault = "a token that it forbids was drawn"

    def allowed(self, ahead: Sequence[int]) -> npt.NDArray[np.bool_]:
        """bool [V]: what may follow everything accepted and then `ahead`.

        All False where the grammar cannot go on. That is a `fault` where it was asked about the
        place reached, and no more than this row's end behind drafts, which may come to nothing.
        """
        place, _, answer = self._walk(ahead)
        size = self._vocabulary.size
        if self._fault:
            return np.zeros(size, np.bool_)
        if place is _Place.REASONING:
            mask = np.ones(size, np.bool_)
            mask[[*self._vocabulary.ends, *self._spec.barred]] = False
            return mask
        used = self._matcher.consume(answer) if answer else 0
        reached = used == len(answer)  # else behind a forbidden draft, or behind the end
        if reached:
            self._matcher.fill(self._words)
        fault = self._matcher.fault or (self._dead_end() if reached else "")
        if used:
            self._return(used)
        if fault:
            if not ahead:
                self._fault = fault
            return np.zeros(size, np.bool_)
        if not reached:
            return np.ones(size, np.bool_)
        bits = np.unpackbits(self._words.view(np.uint8), count=size, bitorder="little")
        if place is _Place.OPENING and self._spec.opening is not None:
            bits[self._spec.opening] = 1
        return bits.view(np.bool_)

    def _dead_end(self) -> str:
        """Why nothing may follow: a vocabulary may lack bytes on which a grammar insists."""
        if self._words.any() and (np.count_nonzero(self._words) > 2 or self._matcher.complete):
            return ""
        ends = self._vocabulary.ends
        rest = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        rest[list(ends)] = 0
        return "" if rest.any() else DEAD_END

    def _return(self, count: int) -> None:
        """Back over `count` tokens ahead; a matcher that ran into a limit starts again."""
        if not self._matcher.fault:
            self._matcher.rollback(count)
            return
        self._matcher = self.compiled.start()
        self._matcher.consume(self._taken)

    def _walk(self, tokens: Sequence[int]) -> tuple[_Place, tuple[int, ...], list[int]]:
        """The place behind `tokens`, the latest ids of reasoning, and the ids of the answer."""
        place, tail, after = self._place, self._tail, self._spec.after
        answer: list[int] = []
        for token in tokens:
            if place is _Place.OPENING:
                place = _Place.REASONING if token == self._spec.opening else _Place.ANSWER
                if place is _Place.REASONING:
                    continue
            if place is _Place.ANSWER:
                answer.append(token)
                continue
            tail = (*tail, token)[-len(after) :]
            if tail == after:
                place, tail = _Place.ANSWER, ()
        return place, tail, answer
