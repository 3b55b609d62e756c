"""Results one step late: the next plan is made before the last result, on the real executor."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from harness import Answer, ask, save_tiny, start, take

from metainfer.core.errors import InternalError
from metainfer.core.request import Request, SamplingParams
from metainfer.core.step import StepPlan
from metainfer.executor.local import LocalExecutor
from metainfer.executor.null import NullDevice
from metainfer.executor.protocol import Executor


def test_late_results_change_no_token(tmp_path: Path, rng: random.Random) -> None:
    save_tiny("llama", tmp_path, 3)
    engine = start(tmp_path, dtype="float64", concurrency=4, chunk_tokens=16, page_tokens=8)
    prompts = [[rng.randrange(3, 131) for _ in range(n)] for n in (3, 20, 41, 7, 30)]
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=12 + i)
        for i in range(len(prompts))
    ]
    expected = ask(engine, prompts, params)
    answers = {f"late-{i}": Answer() for i in range(len(prompts))}
    scheduler, executor = engine.scheduler, engine._executor
    assert executor is not None
    for name, prompt, wanted in zip(answers, prompts, params, strict=True):
        engine.submit(Request(name, tuple(prompt), wanted))
    deepest = 0
    while scheduler.has_work:
        plan = scheduler.schedule() if scheduler.awaiting < 2 else None
        if plan is not None:
            executor.submit(plan)
        deepest = max(deepest, scheduler.awaiting)
        if scheduler.awaiting == 2 or plan is None:
            for output in scheduler.commit(executor.collect()):
                take(answers[output.request_id], output)
    assert deepest == 2
    for answer, wanted in zip(answers.values(), expected, strict=True):
        assert answer.tokens == wanted.tokens and answer.finish == wanted.finish
    scheduler.audit()


def test_a_third_open_plan_is_refused() -> None:
    engine = start("random:tiny-llama")
    executor = engine._executor
    assert isinstance(executor, LocalExecutor)
    for step in range(2):
        executor.submit(StepPlan(step, ()))
    with pytest.raises(InternalError, match="three"):
        executor.submit(StepPlan(2, ()))
    assert [executor.collect().step, executor.collect().step] == [0, 1]


def test_closing_twice_drops_open_plans_once() -> None:
    executor = start("random:tiny-llama")._executor
    assert executor is not None
    executor.submit(StepPlan(0, ()))
    executor.close()
    executor.close()
    with pytest.raises(IndexError):
        executor.collect()


def test_every_executor_speaks_the_protocol() -> None:
    members = {name for name in vars(Executor) if not name.startswith("_")}
    assert members == {"submit", "collect", "execute", "close"}
    for kind in (LocalExecutor, NullDevice):
        assert members <= set(dir(kind))
