"""One KV domain's queue, running list and slots; admission under the promise of progress (B-28).

Admission charges a sequence for what it lacks, on top of what already running prompts still lack,
plus one page per running sequence as head room. When nothing runs in the domain the head of the
queue is admitted whenever it fits into the pool, and everything that fits into an empty pool does.
"""

from __future__ import annotations

import heapq
from bisect import insort

from metainfer.kv.book.manager import Hit, KVManager
from metainfer.scheduler.metrics import GapWindow
from metainfer.scheduler.sequence import Sequence


class Domain:
    """`running` is ordered by (priority, arrival): the first always progresses, the last yields."""

    def __init__(self, index: int, kv: KVManager, max_running: int) -> None:
        self.index = index
        self.kv = kv
        self.running: list[Sequence] = []
        self.gaps = GapWindow()
        self.waiting_count = 0
        first = index * kv.sizes.slots
        self._slots = list(range(first, first + min(max_running, kv.sizes.slots)))  # heap
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # heap
        self._room: list[int] | None = None  # unclaimed pages per group, within one step
        self._blocked: tuple[int, int] | None = None  # (head's index, kv.released) that failed

    # -- queue -------------------------------------------------------------------------------------

    def enqueue(self, seq: Sequence) -> None:
        heapq.heappush(self._waiting, (seq.order, seq))
        self.waiting_count += 1

    def head(self) -> Sequence | None:
        """The next to admit; cancelled ones are skipped."""
        while self._waiting and self._waiting[0][1].done:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def backlog(self) -> int:
        """Tokens due in queue and running list, for placing new requests."""
        queued = sum(seq.due for _, seq in self._waiting if not seq.done)
        return queued + sum(max(seq.due, 1) for seq in self.running)

    # -- admission ---------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget what was computed about room; pages moved since."""
        self._room = None

    def next_admissible(self) -> tuple[Sequence, Hit] | None:
        """The head of the queue and its hit, if a slot and room for its prompt exist now."""
        seq = self.head()
        if seq is None or not self._slots or seq.in_flight:
            return None
        state = (seq.index, self.kv.released)
        if self.running and self._blocked == state:
            return None
        assert seq.prefix is not None
        hit = self.kv.match(seq.prefix, seq.known if seq.uses_cache else 1)
        lack = self.kv.missing(min(seq.known + 1, seq.stop_at), hit)
        if self._room is None:
            self._room = self._unclaimed()
        if any(
            need + len(self.running) > have for need, have in zip(lack, self._room, strict=True)
        ):
            self._blocked = state
            return None
        self._room = [have - need for need, have in zip(lack, self._room, strict=True)]
        return seq, hit

    def _unclaimed(self) -> list[int]:
        """Pages per group that no running prompt still needs."""
        room = [pool.available for pool in self.kv.pools]
        for other in self.running:
            if other.due > 1 and other.account is not None:
                for i, pages in enumerate(self.kv.shortfall(other.account, other.known)):
                    room[i] -= pages
        return room

    def admit(self, seq: Sequence) -> None:
        """Move the head from queue to running list and give it a slot."""
        heapq.heappop(self._waiting)
        self.waiting_count -= 1
        seq.slot = heapq.heappop(self._slots)
        insort(self.running, seq, key=_order)

    # -- leaving -----------------------------------------------------------------------------------

    def vacate(self, seq: Sequence) -> None:
        """Give back pages and slot; the caller takes the sequence off the running list."""
        assert seq.account is not None
        self.kv.free(seq.account)
        seq.account = None
        heapq.heappush(self._slots, seq.slot)

    def sweep(self) -> None:
        """Drop finished sequences from the running list."""
        self.running = [seq for seq in self.running if not seq.done]


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order
