"""Law 6, `--try-limit`: before ready, a request as long as the plan promises was served."""

from __future__ import annotations

from typing import Any

import pytest
from harness import ask

from metainfer.core.errors import RequestError, UserError
from metainfer.core.intent import Intent
from metainfer.core.request import Request, SamplingParams
from metainfer.core.step import StepPlan
from metainfer.engine.engine import Engine
from metainfer.engine.protocol import EngineStats, Guards, Progress
from metainfer.executor.local import LocalExecutor

INTENT = Intent(model="random:tiny-llama", context=128, chunk_tokens=48, concurrency=2)


def started(try_limit: bool, told: list[Progress] | None = None) -> Engine:
    seen = [] if told is None else told
    engine = Engine(INTENT, seen.append, guards=Guards(hang_after_s=0.0, try_limit=try_limit))
    engine.start()
    return engine


@pytest.mark.parametrize("asked", [True, False])
def test_every_token_of_the_promise_is_served_before_ready(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    ends: list[int] = []
    submit = LocalExecutor.submit

    def watched(self: LocalExecutor, plan: StepPlan) -> None:
        runs = [run for s in plan.segments for run in s.ranks[0].runs if s.layout != "warm"]
        ends.extend(run.end for run in runs)
        submit(self, plan)

    monkeypatch.setattr(LocalExecutor, "submit", watched)
    # A CPU captures no draws; as if each run had one behind a captured step.
    monkeypatch.setattr(LocalExecutor, "draws", property(lambda self: {"likeliest": len(ends)}))
    told: list[Progress] = []
    engine = started(asked, told)
    try:
        assert ends == ([48, 96, 127] if asked else [])
        notes = [each.detail for each in told if "of 127 tokens" in each.detail]
        assert bool(notes) is asked
        # Nothing of it is left: no counter, no gauge, no cached page.
        assert engine.stats() == EngineStats()
        assert not any(pool.cached for pool in engine.scheduler.domains[0].kv.pools)
        (answer,) = ask(engine, [[5] * 100], SamplingParams(temperature=0.0, max_tokens=3))
        assert len(answer.tokens) == 3 and engine.stats().prompt_tokens == 100
    finally:
        engine.close()


def test_a_promise_that_breaks_is_no_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the request meets, and what may be done about it, in one error."""
    launch: Any = LocalExecutor._launch

    def short(self: LocalExecutor, plan: StepPlan) -> Any:
        ends = [run.end for s in plan.segments for run in s.ranks[0].runs if s.layout != "warm"]
        if 127 in ends:
            raise MemoryError("16 GiB asked")
        return launch(self, plan)

    monkeypatch.setattr(LocalExecutor, "_launch", short)
    with pytest.raises(UserError, match="a prompt of 127 tokens, as the plan promises") as told:
        started(True)
    assert told.value.code == "limit_failed" and "--context" in told.value.remedy
    assert "memory" in told.value.cause


def test_a_refused_request_is_no_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Engine, request: Request) -> None:
        raise RequestError("there is no room")

    monkeypatch.setattr(Engine, "submit", refuse)
    with pytest.raises(UserError, match="no answer: there is no room"):
        started(True)
