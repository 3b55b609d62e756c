"""Counters and gauges of the scheduler; plain numbers that only it writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

SLICE_S = 5.0
SLICES = 12

ALL_IN_VAIN = 512
"""Drafts without one accepted after which something is wrong: at 1 % acceptance this has odds of
0.6 %."""
LONG_RUN, ALIKE = 32, 3
"""Times that an answer ends in one token, and answers in a row that end in the same, until that is
an alarm (seeds)."""
ENOUGH_ACCEPTED = 16
"""Accepted drafts that end the alarm."""


@dataclass(slots=True)
class Counters:
    """Only grow. `prompt_tokens` are computed ones, `cached_tokens` those found in the cache."""

    steps: int = 0
    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    rejected: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_query_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    abandoned: int = 0  # steps for which memory did not suffice
    non_finite: int = 0  # requests that met NaN or infinity


@dataclass(frozen=True, slots=True)
class Stats:
    """A reading: gauges now, counters since start. Gaps are of the last minute, per domain.

    `draft_depth`: drafts that the latest step asked for; `draft_gain`: their tokens per second over
    those without, where the depth is chosen by it.
    """

    running: int
    waiting: int
    kv_used: float
    decode_gaps_s: tuple[float, ...]
    cache_alarms: tuple[str, ...]
    draft_alarm: str
    draft_depth: int
    draft_gain: float | None
    counters: Counters
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()

    @property
    def longest_decode_gap_s(self) -> float:
        return max(self.decode_gaps_s, default=0.0)


class DraftWatch:
    """Raises an alarm when drafts are verified and not one of them is ever accepted (B-24).

    A single lucky draft does not end the alarm: `ENOUGH_ACCEPTED` since it was raised do.
    """

    def __init__(self) -> None:
        self._in_vain = 0  # verified since one was accepted
        self._accepted = 0  # since the alarm was raised
        self._raised = False

    def note(self, drafted: int, accepted: int) -> None:
        """A verify run came back."""
        self._in_vain = 0 if accepted else self._in_vain + drafted
        if self._raised:
            self._accepted += accepted
            self._raised = self._accepted < ENOUGH_ACCEPTED
        elif self._in_vain >= ALL_IN_VAIN:
            self._raised, self._accepted = True, 0

    @property
    def alarm(self) -> str:
        """One line, empty when all is well."""
        if not self._raised:
            return ""
        return (
            f"none of the last {self._in_vain} drafted tokens was accepted"
            if self._in_vain
            else f"only {self._accepted} drafted tokens were accepted since a run of none"
        )


class RepeatWatch:
    """Raises an alarm when answers of several requests end in one and the same token, over and over
    (B-24): a broken drafter or a verify kernel does that, whatever is asked. An answer that ends
    otherwise takes it back.
    """

    def __init__(self) -> None:
        self._token = -1
        self._answers = 0  # in a row that end in it

    def ended(self, answer: Sequence[int]) -> None:
        """An answer is complete; one that is too short tells nothing."""
        if len(answer) < LONG_RUN:
            return
        tail = set(answer[-LONG_RUN:])
        token = tail.pop() if len(tail) == 1 else -1
        self._answers = self._answers + 1 if token == self._token and token >= 0 else 1
        self._token = token

    @property
    def alarm(self) -> str:
        """One line, empty when all is well."""
        if self._token < 0 or self._answers < ALIKE:
            return ""
        return (
            f"the last {self._answers} answers all end in token {self._token}, "
            f"{LONG_RUN} times and more"
        )


class GapWindow:
    """The longest time between two tokens of one answer, over the last minute."""

    def __init__(self) -> None:
        self._slices: deque[tuple[int, float]] = deque(maxlen=SLICES)

    def note(self, now: float, gap: float) -> None:
        number = int(now / SLICE_S)
        if self._slices and self._slices[-1][0] == number:
            self._slices[-1] = (number, max(gap, self._slices[-1][1]))
        else:
            self._slices.append((number, gap))

    def longest(self, now: float) -> float:
        oldest = int(now / SLICE_S) - SLICES
        return max((gap for number, gap in self._slices if number > oldest), default=0.0)
