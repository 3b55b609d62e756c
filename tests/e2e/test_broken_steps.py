"""A step that breaks costs the request that broke it, and nobody else a token."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ask, save_tiny

from metainfer.core.plan import StepGraph
from metainfer.core.request import FinishReason, SamplingParams
from metainfer.core.step import NON_FINITE, StepPlan
from metainfer.engine.engine import Engine
from metainfer.engine.protocol import Fault, Guards
from metainfer.engine.recorder import hashed, read
from metainfer.executor.protocol import NanGuard

BAD = 77
"""The token whose embedding is NaN."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def watched(folder: Path | str, **intent: Any) -> tuple[Engine, list[Fault]]:
    from metainfer.core.intent import Intent

    guard = intent.pop("guard", NanGuard.LOGITS)
    faults: list[Fault] = []
    # In float64, since other batches and chunks round otherwise, and a tie must not decide.
    made = {"threads": 1, "page_tokens": 8, "chunk_tokens": 16, "concurrency": 8, **intent}
    made.setdefault("dtype", "float64")
    engine = Engine(
        Intent(model=str(folder), **made),
        guards=Guards(guard, 0.0),
        on_fault=faults.append,
    )
    engine.start()
    return engine, faults


def poison_embedding(engine: Engine) -> torch.Tensor:
    """The row of `BAD` as it was."""
    parts = engine._executor._parts  # type: ignore[union-attr]
    row = embedding(parts)[BAD]
    sound: torch.Tensor = row.clone()
    row.fill_(math.nan)
    return sound


def embedding(parts: Any) -> Any:
    (table,) = parts.model.ends.embed.data.values()
    return table


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", folder, 5)
    return folder


def prompts_of(rng: random.Random, *lengths: int) -> list[list[int]]:
    return [[rng.randrange(3, BAD) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("guard", [NanGuard.LOGITS, NanGuard.LAYERS])
def test_nan_ends_its_request_alone(tiny: Path, rng: random.Random, guard: NanGuard) -> None:
    """Neighbours in the same steps draw what they draw without it; the first op is named."""
    engine, faults = watched(tiny, guard=guard)
    good = prompts_of(rng, 5, 40, 9)
    want = [answer.tokens for answer in ask(engine, good, GREEDY)]
    poison_embedding(engine)
    bad = [*prompts_of(rng, 6)[0], BAD]
    answers = ask(engine, [good[0], bad, *good[1:]], GREEDY)
    assert [a.tokens for i, a in enumerate(answers) if i != 1] == want
    broken = answers[1]
    assert broken.finish is FinishReason.ERROR and broken.tokens == []
    assert [fault.kind for fault in faults] == [NON_FINITE]
    assert "first at embed (before the first layer" in faults[0].text
    (event,) = read(engine._recorder.block)["events"]
    assert event["kind"] == NON_FINITE and event["site"] == "embed" and event["layer"] is None
    assert engine.stats().non_finite == 1


def test_nan_inside_a_layer_is_named(tiny: Path, rng: random.Random) -> None:
    engine, faults = watched(tiny)
    engine._executor._parts.model.layers[2].mlp_norm[3] = math.nan  # type: ignore[union-attr]
    (answer,) = ask(engine, prompts_of(rng, 7), GREEDY)
    assert answer.finish is FinishReason.ERROR
    assert "first at add_rmsnorm" in faults[0].text and "(layer 2," in faults[0].text


def test_each_step_is_judged_by_itself(tiny: Path, rng: random.Random) -> None:
    engine, faults = watched(tiny, guard=NanGuard.LAYERS)
    parts = engine._executor._parts  # type: ignore[union-attr]
    sound = poison_embedding(engine)
    ask(engine, [[5, BAD]], GREEDY)
    embedding(parts)[BAD] = sound
    parts.model.layers[2].mlp_norm[3] = math.nan
    ask(engine, prompts_of(rng, 7), GREEDY)
    assert "first at embed" in faults[0].text and "(layer 2," in faults[1].text


def test_layers_are_looked_at_without_graphs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from metainfer.executor import local
    from metainfer.executor.static import DeviceTables

    captured: list[int] = []

    class Steps:
        def __init__(self, *parts: Any) -> None: ...

        def capture(self, shape: StepGraph) -> None:
            captured.append(shape.tokens)

        def run(self, *step: Any, eager: bool) -> None: ...

    monkeypatch.setattr(local, "StaticSteps", Steps)
    engine, _ = watched(tiny)
    executor: Any = engine._executor
    graphs = tuple(StepGraph(phase="decode", tokens=n, runs=n) for n in (1, 2))
    executor._parts = replace(executor._parts, graphs=graphs)
    executor._tables = DeviceTables(executor._slots, torch.device("cpu"))
    executor.nan_guard = NanGuard.LAYERS
    executor.warm()
    assert not captured
    executor.nan_guard = NanGuard.LOGITS
    executor.warm()
    assert captured == [1, 2]


def test_nan_that_does_not_come_again_is_said(tiny: Path, rng: random.Random) -> None:
    engine, faults = watched(tiny)
    model = engine._executor._parts.model  # type: ignore[union-attr]
    forward = model.forward

    def once(*args: Any) -> torch.Tensor:
        del model.forward
        return forward(*args) * math.nan

    model.forward = once
    prompt = prompts_of(rng, 7)
    assert ask(engine, prompt, GREEDY)[0].finish is FinishReason.ERROR
    assert "not so when computed again" in faults[0].text
    assert ask(engine, prompt, GREEDY)[0].finish is FinishReason.LENGTH


def test_a_broken_chunk_is_found_and_never_hit(tiny: Path, rng: random.Random) -> None:
    """NaN early in a long prompt: the request ends with that chunk, its pages are not found."""
    engine, _ = watched(tiny)
    (prompt,) = prompts_of(rng, 60)
    prompt[20] = BAD
    sound = poison_embedding(engine)
    steps = engine.stats().steps
    assert ask(engine, [prompt], GREEDY)[0].finish is FinishReason.ERROR
    assert engine.stats().steps - steps == 2  # the chunk that holds it, not the prompt's end
    embedding(engine._executor._parts)[BAD] = sound  # type: ignore[union-attr]
    answer = ask(engine, [prompt], GREEDY)[0]
    assert answer.finish is FinishReason.LENGTH and answer.cached_tokens == 0


def test_pages_that_later_logits_condemn_are_forgotten(tiny: Path, rng: random.Random) -> None:
    """Pages of earlier chunks looked sound; the answer's own NaN takes them out of the cache."""
    engine, _ = watched(tiny)
    (prompt,) = prompts_of(rng, 40)
    parts = engine._executor._parts  # type: ignore[union-attr]
    logits, calls = parts.model.logits, []

    def broken(*args: Any) -> torch.Tensor:
        calls.append(1)
        return logits(*args) * (math.nan if len(calls) == 4 else 1.0)

    parts.model.logits = broken
    first = ask(engine, [prompt], GREEDY)[0]
    assert first.finish is FinishReason.ERROR and len(first.tokens) == 3
    again = ask(engine, [prompt], GREEDY)[0]
    assert again.cached_tokens == 0 and again.finish is FinishReason.LENGTH
    assert ask(engine, [prompt], GREEDY)[0].cached_tokens == 32


def test_memory_that_held_nan_is_used_again(tiny: Path, rng: random.Random) -> None:
    """Pages with NaN in them go back to the pool; whoever gets them next does not notice."""
    engine, _ = watched(tiny, context=64, concurrency=2, prefix_cache=False)
    good = prompts_of(rng, 30, 31, 29, 33)
    want = [answer.tokens for answer in ask(engine, good, GREEDY)]
    for layer in engine._executor._parts.store.layers:  # type: ignore[union-attr]
        layer["kv"].k.fill_(math.nan)
        layer["kv"].v.fill_(math.nan)
    assert [answer.tokens for answer in ask(engine, good, GREEDY)] == want


def test_the_guard_can_be_off(tiny: Path, rng: random.Random) -> None:
    engine, faults = watched(tiny, guard=NanGuard.OFF)
    poison_embedding(engine)
    assert ask(engine, [[5, BAD]], GREEDY)[0].finish is FinishReason.LENGTH
    assert not faults


def test_nan_among_prompt_logprobs(tiny: Path, rng: random.Random) -> None:
    engine, _ = watched(tiny)
    poison_embedding(engine)
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    answer = ask(engine, [[5, 6, BAD, 7]], params)[0]
    assert answer.finish is FinishReason.ERROR and not answer.prompt_logprobs


def test_a_hybrid_model_says_its_layer_too(rng: random.Random) -> None:
    engine, faults = watched("random:tiny-deepseek-v4", page_tokens=None, chunk_tokens=None)
    layer = engine._executor._parts.model.layers[1]  # type: ignore[union-attr]
    layer.kv_norm[0] = math.nan
    assert ask(engine, prompts_of(rng, 9), GREEDY)[0].finish is FinishReason.ERROR
    assert "(layer 1," in faults[0].text, faults[0].text


def test_a_hybrid_model_recomputes_the_same_tokens(rng: random.Random) -> None:
    """States and windows of a step that was given up are as if it had never been."""
    engine, _ = watched("random:tiny-deepseek-v4", page_tokens=None, chunk_tokens=None)
    prompts = prompts_of(rng, 30, 45, 7)
    want = [answer.tokens for answer in ask(engine, prompts, GREEDY)]
    hungry = Hungry(engine, lambda runs: len(runs) > 1)
    assert [answer.tokens for answer in ask(engine, prompts, GREEDY)] == want
    assert hungry.failed


# -- memory ----------------------------------------------------------------------------------------


class Hungry:
    """Stands before an executor; raises as torch does while `lacks` says so."""

    def __init__(self, engine: Engine, lacks: Any) -> None:
        executor: Any = engine._executor
        self._segment, self.lacks = executor._segment, lacks
        self.failed: list[int] = []
        executor._segment = self

    def __call__(self, segment: Any) -> Any:
        runs = segment.ranks[0].runs
        if self.lacks(runs):
            self.failed.append(len(runs))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0")
        return self._segment(segment)


def test_one_request_that_needs_too_much_ends_alone(tiny: Path, rng: random.Random) -> None:
    engine, faults = watched(tiny)
    good = prompts_of(rng, 5, 40, 9, 17, 21)
    want = [answer.tokens for answer in ask(engine, good, GREEDY)]
    hungry = Hungry(engine, lambda runs: any(BAD in run.tokens for run in runs))
    answers = ask(engine, [*good[:2], [5, BAD, 9], *good[2:]], GREEDY)
    assert [a.tokens for i, a in enumerate(answers) if i != 2] == want
    culprit = answers[2]
    assert culprit.finish is FinishReason.ERROR
    assert "2.50 GiB were asked for" in culprit.error and "MiB are free" in culprit.error
    assert hungry.failed[0] > 1 and hungry.failed[-1] == 1
    assert {fault.kind for fault in faults} == {"out_of_memory"}
    assert engine.stats().abandoned_steps == len(hungry.failed)
    assert engine.scheduler.trials.most_running > 100  # the cause is gone, nothing stays bounded


@pytest.mark.parametrize("most", [2])
def test_a_batch_that_is_too_large_goes_on_smaller(
    tiny: Path, rng: random.Random, most: int
) -> None:
    """Nobody is to blame: all end as they would, and no more run at once than fitted."""
    engine, _ = watched(tiny)
    prompts = prompts_of(rng, 5, 40, 9, 17, 21, 3)
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=10 + i) for i in range(len(prompts))
    ]
    want = [answer.tokens for answer in ask(engine, prompts, params)]
    hungry = Hungry(engine, lambda runs: len(runs) > most)
    answers = ask(engine, prompts, params)
    assert [answer.tokens for answer in answers] == want
    assert len(hungry.failed) < 12  # it learns
    assert engine.scheduler.trials.most_running <= most
    hungry.lacks = lambda runs: False
    assert [answer.tokens for answer in ask(engine, prompts, params)] == want
    assert engine.scheduler.trials.most_running > 100  # forgotten when idle


def test_a_chunk_that_is_too_long_is_computed_in_shorter_ones(
    tiny: Path, rng: random.Random
) -> None:
    engine, _ = watched(tiny, chunk_tokens=64)
    prompts = prompts_of(rng, 100, 90)
    want = [answer.tokens for answer in ask(engine, prompts, GREEDY)]
    Hungry(engine, lambda runs: sum(len(run.tokens) for run in runs) > 20)
    engine.scheduler.domains[0].kv.flush()
    assert [answer.tokens for answer in ask(engine, prompts, GREEDY)] == want


def test_memory_that_lacks_once_costs_nobody_an_answer(tiny: Path, rng: random.Random) -> None:
    engine, _ = watched(tiny)
    prompts = prompts_of(rng, 30, 12)
    want = [answer.tokens for answer in ask(engine, prompts, GREEDY)]
    left = [5]

    def lacks(runs: Any) -> bool:
        left[0] -= 1
        return left[0] == 0

    Hungry(engine, lacks)
    assert [answer.tokens for answer in ask(engine, prompts, GREEDY)] == want


def test_requests_that_come_and_go_during_a_trial(tiny: Path, rng: random.Random) -> None:
    from metainfer.core.request import Request

    engine, _ = watched(tiny)
    prompts = prompts_of(rng, 20, 25, 30)
    want = [answer.tokens for answer in ask(engine, [*prompts, prompts[0]], GREEDY)]
    Hungry(engine, lambda runs: len(runs) > 1)
    names = iter(range(3, 4))
    late: list[Any] = []

    def meddle(step: int, engine: Engine) -> None:
        if step == 2:
            engine.submit(Request(f"late-{next(names)}", tuple(prompts[0]), GREEDY))
        if step == 4:
            late.extend(engine.cancel(["late-3"]))

    answers = ask(engine, prompts, GREEDY, before_step=meddle)
    assert [answer.tokens for answer in answers] == want[:3]
    assert late and late[0].finish is FinishReason.CANCELLED


def test_other_errors_still_end_the_engine(tiny: Path, rng: random.Random) -> None:
    engine, _ = watched(tiny)

    def broken(segment: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    engine._executor._segment = broken  # type: ignore[union-attr,method-assign]
    with pytest.raises(RuntimeError, match="illegal"):
        ask(engine, prompts_of(rng, 5), GREEDY)
    assert read(engine._recorder.block)["steps"][-1]["outcome"]["error"] == "RuntimeError"


# -- recorder --------------------------------------------------------------------------------------


def test_the_recorder_keeps_the_last_steps_without_ids_or_text(
    tiny: Path, rng: random.Random
) -> None:
    engine, _ = watched(tiny)
    plans: list[StepPlan] = []
    submit = engine._executor.submit  # type: ignore[union-attr]

    def seen(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    engine._executor.submit = seen  # type: ignore[union-attr,method-assign]
    ask(engine, prompts_of(rng, 40, 3), SamplingParams(temperature=0.0, max_tokens=210))
    found = read(engine._recorder.block)
    assert found["in_flight"] is None and len(found["steps"]) == 200
    for plan, step in zip(plans[-200:], found["steps"], strict=True):
        assert step["step"] == plan.step
        assert sum(segment["tokens"] for segment in step["segments"]) == plan.tokens
        assert step["outcome"]["seconds"] > 0
    segments = [segment for step in found["steps"] for segment in step["segments"]]
    names = {run["request"] for segment in segments for run in segment["listed"]}
    entered = {hashed(new.request_id) for plan in plans for new in plan.new}
    assert names and names <= entered
