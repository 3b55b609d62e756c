"""One KV domain's queue, running list and slots; admission under the promise of progress (B-28).

Admission charges a sequence for what it lacks, on top of what already running prompts still lack,
plus one page per running sequence as head room. When nothing runs in the domain the head of the
queue is admitted whenever it fits into the pool, and everything that fits into an empty pool does.

While the head waits for pages, smaller requests of its priority close behind it may pass, at most
`OVERTAKES` of them in the head's life: a huge prompt neither blocks the queue nor starves in it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Container

from metainfer.kv.book.manager import Hit, KVManager
from metainfer.scheduler.metrics import GapWindow
from metainfer.scheduler.sequence import Sequence

LOOKAHEAD = 8
OVERTAKES = 16


class Domain:
    """`running` and `waiting` are ordered by (priority, arrival): of the running ones the first
    always progresses and the last yields."""

    def __init__(self, index: int, kv: KVManager, max_running: int) -> None:
        self.index = index
        self.kv = kv
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.gaps = GapWindow()
        self.behind = 0  # tokens of this step for decodes that are due more than one
        first = index * kv.sizes.slots
        self._slots = list(range(first, first + max_running))  # heap
        self._room: list[int] | None = None  # unclaimed pages per group, within one step
        self._arrivals = 0
        self._blocked: tuple[int, int, int] | None = None  # the state in which nothing could enter

    # -- queue -------------------------------------------------------------------------------------

    def enqueue(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_order)
        self._arrivals += 1

    def dequeue(self, seq: Sequence) -> None:
        del self.waiting[bisect_left(self.waiting, seq.order, key=_order)]

    def backlog(self) -> int:
        """Tokens due in queue and running list, for placing new requests."""
        return sum(seq.due for seq in self.waiting) + sum(max(seq.due, 1) for seq in self.running)

    # -- admission ---------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget what was computed about room; pages moved since."""
        self._room = None

    def next_admissible(self, wanted: Container[str] | None = None) -> tuple[Sequence, Hit] | None:
        """The next to run and its hit, if a slot and room for its prompt exist now.

        Only a request whose id is in `wanted`, where that is given.
        """
        if not self.waiting or not self._slots:
            return None
        if wanted is not None:
            listed = (seq for seq in self.waiting if seq.request_id in wanted)
            seq = next(listed, None)
            hit = None if seq is None else self._hit_with_room(seq)
            return None if seq is None or hit is None else (seq, hit)
        head = self.waiting[0]
        state = (head.index, self.kv.released, self._arrivals)
        if self.running and self._blocked == state:
            return None  # no page came free and nobody arrived since
        reach = LOOKAHEAD if head.overtaken < OVERTAKES else 1
        for seq in self.waiting[:reach]:
            if seq.request.priority != head.request.priority:
                continue
            hit = self._hit_with_room(seq)
            if hit is not None:
                head.overtaken += seq is not head
                return seq, hit
        self._blocked = state
        return None

    def _hit_with_room(self, seq: Sequence) -> Hit | None:
        """The hit of a waiting sequence, its pages set aside; None when they are not there."""
        assert seq.prefix is not None
        hit = self.kv.match(seq.prefix, seq.known if seq.uses_cache else 1)
        lack = self.kv.missing(min(seq.known + 1, seq.stop_at), hit)
        if self._room is None:
            self._room = self._unclaimed()
        left = [have - need for need, have in zip(lack, self._room, strict=True)]
        if any(pages < len(self.running) for pages in left):
            return None
        self._room = left
        return hit

    def _unclaimed(self) -> list[int]:
        """Pages per group that no running prompt still needs."""
        room = [pool.available for pool in self.kv.pools]
        for other in self.running:
            if other.due > 1 and other.account is not None:
                for i, pages in enumerate(self.kv.shortfall(other.account, other.known)):
                    room[i] -= pages
        return room

    def admit(self, seq: Sequence) -> None:
        """Move a sequence from queue to running list and give it a slot."""
        self.dequeue(seq)
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
