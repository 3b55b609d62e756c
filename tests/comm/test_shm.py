"""Processes over shared memory: exact; when one dies, stops, leaves or never comes, all know."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ranks import leftovers, token

from metainfer.comm import layout
from metainfer.comm.backends.slabs import wait_until
from metainfer.comm.guard import Guard
from metainfer.workers.process import spawn

PROGRAM = Path(__file__).with_name("forked.py")


SCENES = (
    *("ops:2", "ops:4", "ops:8", "large:2", "crash:4", "stop:3", "leave:3"),
    *("quiet_end:3", "absent:3", "disagree:3", "more:3", "short:3"),
    *("unserved:2", "unserved:3"),
)
Found = dict[str, object]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    """What each rank of each scene found; of a rank that wrote nothing, ``dead``."""
    folder, name = tmp_path_factory.mktemp("scenes"), token()
    command = [sys.executable, str(PROGRAM), name, str(folder), *SCENES]
    with spawn(command, name="scenes", log=folder / "log") as child:
        assert child.wait(200) == 0, (folder / "log").read_text()
    assert leftovers(*(f"{name}-{index}" for index in range(len(SCENES)))) == []
    found: dict[str, list[Found]] = {}
    for scene in SCENES:
        what, _, world = scene.partition(":")
        files = [folder / f"{what}-{world}-{rank}.json" for rank in range(int(world))]
        found[scene] = [json.loads(f.read_text()) if f.exists() else {"dead": True} for f in files]
    return found


@pytest.mark.parametrize("world", [2, 4, 8])
def test_t2_every_op_between_processes(world: int, played: dict[str, list[Found]]) -> None:
    for found in played[f"ops:{world}"]:
        assert found == {"wrong": [], "texts": list(range(world))}


def test_64_mb(played: dict[str, list[Found]]) -> None:
    assert played["large:2"] == [{"right": [True, True]}] * 2


def test_t4_a_killed_rank_is_named_by_all(played: dict[str, list[Found]]) -> None:
    results = played["crash:4"]
    assert results[1] == {"dead": True}
    for rank in (0, 2, 3):
        found = results[rank]
        assert found["peer"] == 1
        text = str(found["error"])
        assert "all_reduce of 8192 B (bfloat16) over 4 ranks failed" in text
        assert "rank 1 died (process" in text


def test_a_stopped_rank_is_told_from_a_slow_one(played: dict[str, list[Found]]) -> None:
    results = played["stop:3"]
    assert [(results[rank]["peer"], results[rank]["secondary"]) for rank in (0, 2)] == [
        (1, False),
        (1, True),
    ]
    assert "exists but has not run for" in str(results[0]["error"])


def test_a_rank_that_left_is_missed_by_whoever_calls_on(played: dict[str, list[Found]]) -> None:
    results = played["leave:3"]
    assert all(found["peer"] == 1 for found in results)
    texts = [str(found["error"]) for found in results]
    assert texts[1].startswith("rank 1 has closed its communicator.")
    for rank in (0, 2):
        assert "rank 1 has closed" in texts[rank] or "without rank 1" in texts[rank]


def test_leaving_after_the_last_call_is_no_failure(played: dict[str, list[Found]]) -> None:
    assert played["quiet_end:3"] == [{"errors": []}] * 3


def test_a_rank_that_never_comes_is_named_in_time(played: dict[str, list[Found]]) -> None:
    results = played["absent:3"]
    for rank in (0, 1):
        assert "rank 2 did not join the group of 3 ranks" in str(results[rank]["error"])


def test_b17_a_different_capacity_on_one_rank_stops_all(played: dict[str, list[Found]]) -> None:
    results = played["disagree:3"]
    assert len({str(found["error"]) for found in results}) == 1
    assert "capacity: 100 on ranks 0, 2, 99 on rank 1" in str(results[0]["error"])
    assert len({found["same"] for found in results}) == 1


def test_more_memory_of_a_group_is_everyone_s(played: dict[str, list[Found]]) -> None:
    assert played["more:3"] == [{"words": [1, 2, 3], "open": []}] * 3


def test_without_memory_on_rank_0_all_know_why(played: dict[str, list[Found]]) -> None:
    results = played["short:3"]
    assert results[0] == {"kind": "UserError", "error": "no memory on rank 0"}
    for found in results[1:]:
        assert found["kind"] == "CommError"
        assert "rank 0 gave up: no memory on rank 0" in str(found["error"])


@pytest.mark.parametrize(
    ("world", "said"),
    [(2, "rank 0 has closed"), (3, "rank 0 gave up: no descriptor on rank 0")],
)
def test_who_stands_in_line_when_rank_0_fails_is_told_by_the_group(
    world: int, said: str, played: dict[str, list[Found]]
) -> None:
    """Not by the clock, after a minute."""
    results = played[f"unserved:{world}"]
    assert results[0] == {"kind": "UserError", "error": "no descriptor on rank 0"}
    for found in results[1:]:
        assert found["kind"] == "CommError" and said in str(found["error"])


@pytest.mark.parametrize("left", [False, True])
def test_the_guard_tells_a_death_from_a_departure(left: bool) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    beats, dead, asked = list[int](), list[int](), list[int]()
    before = set(threading.enumerate())

    def closed(peer: int) -> bool:
        asked.append(peer)
        return left

    guard = Guard({3: child.pid}, beats.append, closed, dead.append)
    try:
        assert wait_until(lambda: len(beats) > 2, time.monotonic() + 120) and not dead
        child.kill()
        child.wait()
        assert wait_until(lambda: asked == [3], time.monotonic() + 120)
        guard.close()  # once its thread is done it has told what it tells
        assert dead == ([] if left else [3])
    finally:
        guard.close()
        child.kill()
        assert child.stdin is not None
        child.stdin.close()
    guard.close()
    assert not {t for t in threading.enumerate() if t.name == "comm-guard"} - before


def test_a_peer_that_is_dead_already_is_told_at_once() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    dead = list[int]()
    guard = Guard({1: child.pid}, lambda now: None, lambda peer: False, dead.append)
    guard.close()
    assert dead == [1]


def test_a_slab_s_head_is_whole_pages() -> None:
    assert layout.HEAD % 4096 == 0
