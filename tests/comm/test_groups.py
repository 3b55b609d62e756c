"""Rank processes and collectives together: one cause for all, and nothing left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import leftovers

from metainfer.workers.group import GroupError
from metainfer.workers.ranks import ProcessGroup

HERE = Path(__file__).parent


def environ(rank: int) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a busy machine have a minute to say that they failed, too."""
    monkeypatch.setattr("metainfer.workers.ranks.SETTLE_S", 60.0)


def start(world: int, target: str = "Reducer", **facts: object) -> ProcessGroup:
    return ProcessGroup.spawn(
        f"rank_workers:{target}",
        world,
        facts=[facts] * world,
        environ=environ,
    )


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "rank 1 failed in step_but: KeyError: 'model.layers.3'"),
        ("kill", "rank 1 failed in step_but: rank 1 was killed by SIGKILL"),
    ],
)
def test_ranks_stuck_in_a_collective_are_released_and_one_cause_is_raised(
    how: str, cause: str
) -> None:
    group = start(3)
    pids = group.pids
    assert group.call("step", 1.0) == [6.0] * 3
    with pytest.raises(GroupError) as caught:
        group.call("step_but", 1, how)
    assert str(caught.value).startswith(cause) and "(2 more ranks failed)" in str(caught.value)
    token = group.token
    group.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert leftovers(token) == []


def test_t2_gloo_every_op_once(tmp_path: Path) -> None:
    with start(2, "Gloo", store=str(tmp_path / "store")) as group:
        assert group.call("every_op") == [[], []]
