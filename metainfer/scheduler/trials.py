"""After a step for which memory did not suffice: its requests are tried until the cause shows.

Everything that runs is put back, which changes no token. Then the step's requests are tried in
halves, each half by itself, until each has got past where the step was to bring it. A request that
fails alone is given smaller chunks; one that fails alone with the smallest is the cause and ends.
If none is, no more run at once, and no longer chunks are computed, than were seen to fit, until the
engine has been idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from metainfer.core.errors import InternalError
from metainfer.core.request import FinishReason
from metainfer.core.step import OUT_OF_MEMORY, RequestOutput

if TYPE_CHECKING:
    from metainfer.scheduler.build import Flight
    from metainfer.scheduler.scheduler import Scheduler
    from metainfer.scheduler.sequence import Sequence

LEAST_CHUNK = 16
"""A request that fails alone with a chunk of so many tokens ends."""

_ALL = 1 << 60

Batch = dict[str, int]
"""Request id -> the position that the failed step was to bring it to."""


class Trials:
    """`most_running` and `most_tokens` (of prompts in a step) bound every step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._batches: deque[Batch] = deque()
        self._tried = 0  # members of the current batch when it began
        self._largest = 0  # the most that were seen to fit together
        self._caused = False  # a request was found to be the cause
        self.most_running = _ALL
        self.most_tokens = _ALL

    @property
    def wanted(self) -> Batch | None:
        """The only requests that may run now; None when there is no trial."""
        return self._batches[0] if self._batches else None

    def reset(self) -> None:
        """The engine was idle: what lacked may be there again."""
        if not self._batches:
            self.most_running = self.most_tokens = _ALL

    def failed(self, flight: Flight, error: str) -> list[RequestOutput]:
        """Put everything back; try the step's requests again. The output of one that ends here."""
        scheduler = self._scheduler
        members: Batch = {}
        for seq, run in flight.entries:
            seq.in_flight -= 1
            if seq.in_flight:
                raise InternalError(f"{seq.request_id} is in a second plan without a result")
            if not seq.done:
                seq.known = len(seq.tokens)
                if seq.prefix is not None:
                    scheduler.domains[seq.domain].kv.unsave(seq.prefix, run.start)
                members[seq.request_id] = min(run.end - run.drafts, seq.stop_at)
        scheduler.put_back()
        if len(members) > 1:
            self._split(members)
            return []
        return self._alone(next(iter(members.items())), flight, error) if members else []

    def _split(self, members: Batch) -> None:
        rest = self._batches.popleft() if self._batches else {}
        if not self._batches and not rest:
            self._largest, self._caused = 0, False
        pairs = list(members.items())
        half = len(pairs) // 2
        parts = [dict(pairs[:half]), dict(pairs[half:])]
        parts += [{name: goal for name, goal in rest.items() if name not in members}]
        self._begin([part for part in parts if part])

    def _alone(self, member: tuple[str, int], flight: Flight, error: str) -> list[RequestOutput]:
        """A step of one request failed: try it alone, then with shorter chunks, then end it."""
        name, goal = member
        if self.wanted is None:
            self._largest, self._caused = 0, False
            self._begin([{name: goal}])
            return []
        tokens = max(len(run.tokens) for seq, run in flight.entries if seq.request_id == name)
        if tokens > LEAST_CHUNK:
            self.most_tokens = max(tokens // 2, LEAST_CHUNK)
            return []
        self._caused = True
        self.most_tokens = _ALL
        scheduler = self._scheduler
        ended = scheduler.cancel(name, FinishReason.ERROR)
        assert ended is not None
        return [
            RequestOutput(
                name,
                (),
                ended.index,
                finish=FinishReason.ERROR,
                cached_tokens=ended.cached_tokens,
                error=error,
                code=OUT_OF_MEMORY,
            )
        ]

    def _begin(self, batches: Iterable[Batch]) -> None:
        self._batches.extendleft(reversed(list(batches)))
        self._tried = len(self._batches[0])

    def settle(self, find: Callable[[str], Sequence | None]) -> None:
        """Go on to the next batch once every member of this one got through, or has ended."""
        while self._batches:
            sequences = [(find(name), goal) for name, goal in self._batches[0].items()]
            if any(seq is not None and not _passed(seq, goal) for seq, goal in sequences):
                return
            self._largest = max(self._largest, self._tried)
            self._batches.popleft()
            if self._batches:
                self._tried = len(self._batches[0])
                self._scheduler.put_back()
            elif not self._caused:
                self.most_running = max(1, self._largest)


def _passed(seq: Sequence, goal: int) -> bool:
    return seq.account is not None and seq.account.length >= goal
