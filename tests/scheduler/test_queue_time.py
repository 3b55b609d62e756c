"""How long a request waited for its first step is told with its first token, and once."""

from __future__ import annotations

import pytest
from null_world import World, config_of, groups_of, request, sizes_of

from metainfer.core.step import RequestOutput
from metainfer.executor.null import NullCost

COST = NullCost(step_s=0.5, prefill_token_s=0.0, decode_token_s=0.0)


def told(world: World) -> dict[str, list[float | None]]:
    """`queue_s` of each output that carries tokens."""
    found: dict[str, list[float | None]] = {}
    take = world._take

    def noting(output: RequestOutput) -> None:
        if output.tokens:
            found.setdefault(output.request_id, []).append(output.queue_s)
        take(output)

    world._take = noting  # type: ignore[method-assign]
    world.run()
    return found


@pytest.mark.parametrize("late", [False, True])
def test_the_wait_ends_with_the_first_step(late: bool) -> None:
    sizes = sizes_of(groups_of("dense", 8), pages=40, slots=1)
    world = World(sizes, config_of(max_running=1), cost=COST, late=late)
    for name in ("a", "b"):
        world.add(request(name, [1, 2, 3], max_tokens=4))
    waits = told(world)
    assert waits["a"][0] == 0.0
    assert waits["b"][0] == pytest.approx(len(waits["a"]) * COST.step_s, abs=1.01 * COST.step_s)
    assert waits["b"][0] >= 2.0


def test_a_request_of_one_token_tells_it_with_its_end() -> None:
    world = World(sizes_of(groups_of("dense", 8), pages=40, slots=1), config_of(max_running=1))
    world.add(request("a", [1, 2, 3], max_tokens=1))
    assert told(world) == {"a": [0.0]}


def test_preemption_does_not_count_as_waiting_for_the_first_step() -> None:
    sizes = sizes_of(groups_of("dense", 8), pages=12, slots=3)
    world = World(sizes, config_of(max_running=3), cost=COST)
    for name in ("a", "b", "c"):
        world.add(request(name, [5] * 12, max_tokens=40))
    waits = told(world)
    assert world.scheduler.counters.preemptions > 0
    assert all(values[0] == 0.0 for values in waits.values())
    assert {wait for values in waits.values() for wait in values} <= {0.0, None}
