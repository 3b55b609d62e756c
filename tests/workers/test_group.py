"""Ranks are called together and raise together, with the first cause."""

from __future__ import annotations

import pytest

from metainfer.core.errors import InternalError
from metainfer.workers.group import GroupError, InprocGroup, RankHealth, WorkerGroup


class Worker:
    def __init__(self, rank: int, log: list[str], fails: frozenset[int] = frozenset()) -> None:
        self.rank, self.log, self.fails = rank, log, fails

    def add(self, amount: int) -> int:
        self.log.append(f"add {self.rank}")
        if self.rank in self.fails:
            raise ValueError(f"rank {self.rank} is full")
        return self.rank + amount

    def close(self) -> None:
        self.log.append(f"close {self.rank}")
        if self.rank in self.fails:
            raise OSError(f"{self.rank} is stuck")


def group(log: list[str], *fails: int) -> InprocGroup:
    return InprocGroup.spawn(lambda rank: Worker(rank, log, frozenset(fails)), 3)


def test_results_come_in_rank_order() -> None:
    log: list[str] = []
    ranks: WorkerGroup = group(log)
    assert ranks.size == 3
    assert ranks.call("add", 10) == [10, 11, 12]
    assert ranks.health() == tuple(RankHealth(rank, True) for rank in range(3))


def test_every_rank_runs_and_the_first_cause_is_raised() -> None:
    log: list[str] = []
    ranks = group(log, 1, 2)
    with pytest.raises(GroupError, match=r"rank 1 failed in add: ValueError: rank 1 is full \(1 m"):
        ranks.call("add", 1)
    assert log == ["add 0", "add 1", "add 2"]


def test_a_failed_group_stays_failed() -> None:
    log: list[str] = []
    ranks = group(log, 0)
    with pytest.raises(GroupError):
        ranks.call("add", 1)
    with pytest.raises(GroupError, match="rank 0"):
        ranks.call("add", 1)
    assert len(log) == 3
    assert not any(rank.alive for rank in ranks.health())


def test_what_was_posted_fails_at_the_next_call() -> None:
    log: list[str] = []
    ranks = group(log)
    ranks.post("add", 1)
    assert log == ["add 0", "add 1", "add 2"] and ranks.call("add", 2) == [2, 3, 4]
    broken = group(log, 1)
    broken.post("add", 1)
    for once_more in (broken.call, broken.post):
        with pytest.raises(GroupError, match="rank 1 failed in add"):
            once_more("add", 1)


def test_close_is_in_reverse_order_and_once() -> None:
    log: list[str] = []
    with group(log) as ranks:
        pass
    ranks.close()
    assert log == ["close 2", "close 1", "close 0"]
    assert ranks.health()[0] == RankHealth(0, False, "closed")
    with pytest.raises(InternalError):
        ranks.call("add", 1)


def test_close_reaches_every_rank_although_one_fails() -> None:
    log: list[str] = []
    with pytest.raises(GroupError, match="rank 1 failed in close"):
        group(log, 1).close()
    assert log == ["close 2", "close 1", "close 0"]


def test_a_failing_constructor_closes_those_made() -> None:
    log: list[str] = []

    def make(rank: int) -> Worker:
        if rank == 2:
            raise MemoryError("no room")
        return Worker(rank, log)

    with pytest.raises(GroupError, match="rank 2 failed in spawn: MemoryError: no room"):
        InprocGroup.spawn(make, 4)
    assert log == ["close 1", "close 0"]


def test_workers_without_a_close_are_fine() -> None:
    log: list[str] = []
    InprocGroup([Worker(0, log), object()]).close()
    assert log == ["close 0"]
