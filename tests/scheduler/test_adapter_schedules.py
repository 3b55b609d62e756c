"""Adapters in the scheduler: places in plans, pages that never cross, names that were not loaded.

The random workloads mix adapters too; there the null device answers differently for each.
"""

from __future__ import annotations

import pytest
from null_world import World, groups_of, request, sizes_of, world_of

from metainfer.core.errors import RequestError
from metainfer.core.step import NO_ADAPTER
from metainfer.scheduler.scheduler import Scheduler

ADAPTERS = {"sql": "digest-1", "law": "digest-2"}
PROMPT = list(range(20))


def hits(world: World, *adapters: str) -> list[int]:
    """Cached tokens of the same prompt, asked once per adapter, one after the other."""
    found = []
    for number, adapter in enumerate(adapters):
        name = f"r{number}"
        assert world.add(request(name, PROMPT, adapter=adapter)) is None
        world.run()
        found.append(world.answers[name].cached)
    world.check()
    return found


def test_b27_a_prefix_is_found_by_its_own_adapter_alone() -> None:
    world = world_of(adapters=ADAPTERS)
    assert hits(world, "", "sql", "law", "sql", "", "law") == [0, 0, 0, 16, 16, 16]


def test_two_names_of_one_content_share() -> None:
    """They compute the same, so a page of one is a page of the other."""
    world = world_of(adapters={"sql": "same", "again": "same"})
    assert world.add(request("a", PROMPT, adapter="sql")) is None
    world.run()
    prefix = world.kv[0].prefix(PROMPT, "", "same")
    assert world.kv[0].match(prefix, len(PROMPT)).tokens == 16
    assert world.kv[0].match(world.kv[0].prefix(PROMPT, ""), len(PROMPT)).tokens == 0


def test_plans_carry_the_place() -> None:
    world = world_of(adapters=ADAPTERS)
    for name, adapter in (("a", "law"), ("b", ""), ("c", "sql")):
        assert world.add(request(name, PROMPT, adapter=adapter)) is None
    world.run()
    entered = {new.request_id: new.adapter for plan in world.plans for new in plan.new}
    assert entered == {"a": 1, "b": NO_ADAPTER, "c": 0}


def test_an_adapter_comes_back_after_preemption() -> None:
    """Two answers that outgrow the pool: whoever is put back enters again with its own place."""
    world = world_of(pages=11, slots=2, adapters=ADAPTERS)
    for name, adapter in (("a", "law"), ("b", "sql")):
        assert world.add(request(name, PROMPT[:8], 60, adapter=adapter)) is None
    world.run()
    entered = [(new.request_id, new.adapter) for plan in world.plans for new in plan.new]
    assert world.scheduler.counters.preemptions > 0
    assert len(entered) > 2
    assert set(entered) == {("a", 1), ("b", 0)}
    world.check()


def test_a_name_that_was_not_loaded_is_refused() -> None:
    world = world_of(adapters=ADAPTERS)
    with pytest.raises(RequestError) as caught:
        world.scheduler.add(request("a", PROMPT, adapter="poems"))
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert "sql, law" in str(caught.value)
    assert world.scheduler.counters.rejected == 1


def test_readings_name_adapters_in_use() -> None:
    sizes = sizes_of(groups_of("dense", 8), pages=60, slots=1)
    world = World(sizes, world_of(slots=1, adapters=ADAPTERS).config, late=False)
    for name, adapter in (("a", "law"), ("b", ""), ("c", "sql"), ("d", "sql")):
        assert world.add(request(name, PROMPT, 30, adapter=adapter)) is None
    world.step()
    stats = world.scheduler.stats()
    assert (stats.running_adapters, stats.waiting_adapters) == (("law",), ("sql",))


def test_without_adapters_nothing_is_read() -> None:
    scheduler: Scheduler = world_of().scheduler
    scheduler.add(request("a", PROMPT))
    assert scheduler.stats().waiting_adapters == ()
