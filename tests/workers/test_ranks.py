"""Rank processes: facts handed out, called together, one cause raised, nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from processes import children, eventually

from metainfer.core.errors import InternalError, UserError
from metainfer.workers.group import GroupError, WorkerGroup
from metainfer.workers.ranks import ProcessGroup

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a busy machine have a minute to say that they failed, too."""
    monkeypatch.setattr("metainfer.workers.ranks.SETTLE_S", 60.0)


def start(size: int = 3, target: str = "rank_targets:Adder", **change: Any) -> ProcessGroup:
    facts = change.pop("facts", [{"device": 10 + rank} for rank in range(size)])

    def environ(rank: int) -> dict[str, str]:
        path = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"PYTHONPATH": path, "RANK_MARK": f"m{rank}"}

    return ProcessGroup.spawn(target, size, facts=facts, environ=environ, **change)


def gone(pids: tuple[int | None, ...]) -> bool:
    return not any(pid is not None and Path(f"/proc/{pid}").exists() for pid in pids)


def test_ranks_get_their_facts_and_answer_in_order(tmp_path: Path) -> None:
    facts = [{"device": 10 + rank, "folder": str(tmp_path)} for rank in range(3)]
    with start(facts=facts) as group:
        ranks: WorkerGroup = group
        assert ranks.call("who") == [[r, 3, group.token, 10 + r, f"m{r}"] for r in range(3)]
        assert ranks.call("add", 5) == [5, 6, 7] and ranks.call("add", 1) == [6, 7, 8]
        big = "x" * 3_000_000
        assert ranks.call("echo", big) == [big] * 3
        assert all(health.alive for health in ranks.health())
        pids = group.pids
    assert gone(pids)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"closed-{r}" for r in range(3)]
    group.close()
    with pytest.raises(InternalError, match="closed group"):
        group.call("who")
    assert group.health()[0].detail == "closed"


def test_the_first_cause_is_the_earliest_and_stays(tmp_path: Path) -> None:
    facts = [{"folder": str(tmp_path)}] * 3
    with start(facts=facts) as group:
        with pytest.raises(GroupError) as caught:
            group.call("fail", [2, 1])
        text = "rank 2 failed in fail: ValueError: layer 3 is missing on 2 (1 more ranks failed)"
        assert str(caught.value) == text and caught.value.rank == 2
        notes = caught.value.__notes__
        assert [note[:7] for note in notes] == ["rank 2:", "rank 1:"]
        assert "rank_targets.py" in notes[0]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["aborted-1", "aborted-2"]
        with pytest.raises(GroupError, match="rank 2 failed in fail"):
            group.call("who")
        assert not any(health.alive for health in group.health())


def test_posted_calls_keep_their_order_and_fail_at_the_next_call() -> None:
    with start() as group:
        for amount in (1, 10, 100):
            group.post("add", amount)
        assert group.call("add", 1000) == [1111, 1112, 1113]
        group.post("fail", [1])
        group.post("add", 1)
        with pytest.raises(GroupError, match="rank 1 failed in fail: ValueError: layer 3"):
            group.call("who")
        with pytest.raises(GroupError, match="rank 1 failed in fail"):
            group.post("add", 1)
    with start() as group:
        group.post("die", 2)
        with pytest.raises(GroupError, match="rank 2 was killed by SIGKILL"):
            group.call("add", 1)


def test_what_was_heard_of_another_rank_is_not_the_cause() -> None:
    with start() as group, pytest.raises(GroupError, match="rank 1 failed in hear: RuntimeError"):
        group.call("hear", 1)


def test_a_killed_rank_is_named_and_no_one_is_left() -> None:
    group = start()
    pids = group.pids
    with pytest.raises(GroupError, match="rank 1 failed in die: rank 1 was killed by SIGKILL"):
        group.call("die", 1)
    assert "SIGKILL" in group.health()[1].detail
    group.close()
    assert eventually(lambda: gone(pids))


def test_a_rank_that_hangs_does_not_hold_back_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 fails once rank 0 has, mostly soon enough to be counted; rank 2 never answers."""
    monkeypatch.setattr("metainfer.workers.ranks.SETTLE_S", 1.0)
    group = start(facts=[{"folder": str(tmp_path)}] * 3)
    pids = group.pids
    with pytest.raises(GroupError, match="rank 0 failed in hang: ValueError: the others go on"):
        group.call("hang", 2)
    group.close()
    assert eventually(lambda: gone(pids))


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("fail_at_start", "rank 1 failed in spawn: ValueError: no room on 1"),
        ("die_at_start", "rank 1 failed in spawn: rank 1 was killed by SIGSEGV"),
    ],
)
def test_a_rank_that_does_not_come_up_ends_all(key: str, word: str) -> None:
    before = children()
    with pytest.raises(GroupError, match=word):
        start(facts=[{key: 1}] * 3)
    assert eventually(lambda: children() <= before)


def test_a_reason_that_is_the_user_s_reaches_him_with_its_remedy() -> None:
    """It said: this is a bug, report it."""
    with pytest.raises(UserError) as caught:
        start(facts=[{"refuse_at_start": 1}] * 3)
    assert isinstance(caught.value, GroupError) and caught.value.rank == 1
    assert caught.value.cause == "rank 1 failed in spawn: 4 B are asked for."
    assert (caught.value.remedy, caught.value.code) == ("Free memory.", "no_memory")
    with pytest.raises(GroupError) as bug:
        start(facts=[{"fail_at_start": 1}] * 3)
    assert not isinstance(bug.value, UserError) and bug.value.code == "rank_failed"


def test_a_rank_that_hangs_at_its_start_ends_all() -> None:
    """The others are up in time, on a busy machine in a longer one."""
    before = children()
    for start_s in (2.0, 10.0, 60.0):
        with pytest.raises(GroupError) as caught:
            start(facts=[{"hang_at_start": 1}] * 3, start_s=start_s)
        assert eventually(lambda: children() <= before)
        if caught.value.rank == 1:
            break
    assert str(caught.value) == "rank 1 failed in spawn: gave no sign of life in time"


def test_wrong_targets_and_results_are_one_line() -> None:
    with pytest.raises(GroupError, match="No module named 'no_such_module'"):
        start(1, "no_such_module:Adder")
    with pytest.raises(GroupError, match="rank_targets:nothing made no worker"):
        start(1, "rank_targets:nothing")
    with start(1) as group, pytest.raises(GroupError, match=r"TypeError.*object"):
        group.call("opaque")
    with start(1) as group, pytest.raises(GroupError, match="AttributeError"):
        group.call("no_such_method")
