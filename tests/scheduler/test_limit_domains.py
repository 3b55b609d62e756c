"""`--try-limit` over ranks with caches of their own: every one of them is filled to the promise."""

from __future__ import annotations

from typing import Any, cast

import pytest
from null_world import World, world_of

from metainfer.core.errors import UserError
from metainfer.core.request import Request
from metainfer.core.step import RequestOutput
from metainfer.engine.engine import Engine
from metainfer.engine.limit import try_limit


class Loop:
    """What `try_limit` asks of an engine, over the null device."""

    def __init__(self, world: World) -> None:
        self._world, self.scheduler = world, world.scheduler
        self.reached = [0] * len(world.scheduler.domains)
        self.ran_at_once = 0
        self.error = ""

    def submit(self, request: Request) -> None:
        self.scheduler.add(request)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> tuple[list[RequestOutput], None]:
        plan = self.scheduler.schedule()
        assert plan is not None
        for segment in plan.segments:
            for domain, rank in enumerate(segment.ranks):
                ends = [run.end for run in rank.runs]
                self.reached[domain] = max([self.reached[domain], *ends])
        self.ran_at_once = max(self.ran_at_once, self.scheduler.running)
        outputs = self.scheduler.commit(self._world.device.execute(plan))
        if self.error:
            outputs[:1] = [
                RequestOutput(out.request_id, (), error=self.error) for out in outputs[:1]
            ]
        return outputs, None


def tried(domains: int, error: str = "") -> tuple[Loop, list[str]]:
    world = world_of("dense", slots=2, pages=40, domains=domains)
    loop, notes = Loop(world), list[str]()
    loop.error = error
    limit = world.scheduler.config.max_context
    try_limit(cast("Engine", cast("Any", loop)), limit, 50, notes.append)
    return loop, notes


@pytest.mark.parametrize("domains", [1, 3])
def test_every_cache_is_filled_at_once(domains: int) -> None:
    loop, notes = tried(domains)
    limit = loop.scheduler.config.max_context
    assert loop.reached == [limit - 1] * domains and loop.ran_at_once == domains
    total = f"{domains * (limit - 1):,} of {domains * (limit - 1):,} tokens"
    assert notes[-1] == total


def test_one_that_fails_is_enough() -> None:
    with pytest.raises(UserError, match="no answer: rank 2 is out of memory"):
        tried(2, "rank 2 is out of memory")
