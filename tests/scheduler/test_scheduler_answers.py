"""The loop on the null device: answers equal the straight line for every kind of cache."""

from __future__ import annotations

import pytest
from null_world import SHAPES, World, groups_of, request, sizes_of

from metainfer.scheduler.config import SchedulerConfig


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_answers_equal_straight_line(shape: str, late: bool) -> None:
    sizes = sizes_of(groups_of(shape, 8), pages=80, slots=4)
    config = SchedulerConfig(
        max_context=120, max_running=4, step_tokens=40, mixed_prefill_tokens=16
    )
    world = World(sizes, config, late=late)
    shared = list(range(30))
    for i in range(7):
        world.add(request(f"r{i}", [*shared[: 5 * i], i, 40 + i, 3], 12))
    world.run()
    world.check()
    for i in range(7):
        world.add(request(f"s{i}", [*shared, i], 5))
    world.run()
    world.check()
    assert sum(manager.watch.hits for manager in world.kv) > 0
