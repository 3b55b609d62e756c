"""Steps launched before the one ahead of them was read: the same answers, whatever comes between.

On CPU a recorded step stands for a card's graph, and the one behind it really runs, on the tokens
that lie on the device, before anything of the one ahead came to the host. All that a replay made is
overwritten by the next, so what is read late has to have been copied before.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import v4
from harness import Answer, ask, save_tiny, start, take
from statics import StaticSteps, again, decode, executor_of, overlap_steps, release_steps
from test_broken_steps import BAD, GREEDY, Hungry, poison_embedding, watched

from metainfer.core.plan import StepGraph
from metainfer.core.request import FinishReason, GrammarSpec, Request, SamplingParams
from metainfer.core.step import Phase
from metainfer.engine.engine import Engine
from metainfer.executor.late import OP_BY_OP
from metainfer.executor.slots import GRAMMAR, HISTORY

THREE = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
LAYOUTS = {"kv": "latent@1", "index": "index@1", "weight": "dense@1", "experts": "experts-dense@1"}
STATIC = ("latent_qkv", "compress", "compress_index", "index_select", "attn_sparse", "moe_experts")
V4_SHAPES = (
    StepGraph(phase="mixed", tokens=20, runs=4),
    StepGraph(phase="chunk", tokens=16, runs=4),
    *decode(4, 2),
)
SHAPES = (StepGraph(phase="mixed", tokens=24, runs=8), *decode(8, 2))
SCHEDULES = int(os.environ.get("SCHEDULES", "1"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """DeepSeek-V4, one layer of each kind; the reference sampler is taken as one that can be
    captured, so that likeliest tokens come out of the graph."""
    folder = tmp_path_factory.mktemp("v4-overlap")
    v4.save(v4.tiny(35, **THREE), folder)
    engine = start(
        folder,
        dtype="float64",
        context=96,
        layouts=LAYOUTS,
        ops=dict.fromkeys(STATIC, "torch-static"),
        concurrency=4,
        chunk_tokens=28,
        page_tokens=16,
    )
    table = executor_of(engine)._parts.ops
    table.choices = tuple(
        dataclasses.replace(c, impl=dataclasses.replace(c.impl, graph_safe=True))
        if c.request.op == "sample"
        else c
        for c in table.choices
    )
    return engine


@pytest.fixture
def late(hybrid: Engine) -> Iterator[StaticSteps]:
    yield overlap_steps(hybrid, V4_SHAPES)
    release_steps(executor_of(hybrid))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-overlap")
    save_tiny("llama", folder, 5)
    return folder


def play(
    engine: Engine,
    requests: Sequence[tuple[int, Request]],
    cancels: Sequence[tuple[str, int]] = (),
) -> list[Answer]:
    """Submit each request at its turn; cancel some once they have so many tokens."""
    answers = {request.request_id: Answer() for _, request in requests}
    waiting, ends, turn = list(requests), dict(cancels), 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= turn:
            engine.submit(waiting.pop(0)[1])
        for name in [name for name, count in ends.items() if len(answers[name].tokens) >= count]:
            del ends[name]
            for output in engine.cancel([name]):
                take(answers[name], output)
        for output in engine.step()[0]:
            take(answers[output.request_id], output)
        turn += 1
        assert turn < 5000, "the engine does not come to an end"
    engine.scheduler.audit()
    return list(answers.values())


def requests_of(schedule: int, word: str) -> list[tuple[int, Request]]:
    """Requests of every kind that a draw can depend on, with their turns, in order. Those whose
    draws ask for all tokens before them are short: beside one of them every step waits."""
    rng = random.Random(schedule)
    stem = [rng.randrange(3, 256) for _ in range(54)]
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "max_tokens": 9},
        {"logprobs": 2, "logit_bias": {7: 4.0}},
        {"min_tokens": 5, "stop_token_ids": tuple(rng.sample(range(256), 120))},
        {"bad_words": ((7,), (rng.randrange(256), rng.randrange(256))), "max_tokens": 9},
    )
    listed = []
    for number in range(10):
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.0, 1.3)),
            top_k=rng.choice((0, 40)),
            seed=number,
            **{"max_tokens": rng.randrange(5, 30), **kinds[number % len(kinds)]},
        )
        prompt = (*stem[: rng.randrange(1, 50)], rng.randrange(3, 256))
        ends = tuple(rng.sample(range(256), rng.choice((0, 6))))
        listed.append((rng.randrange(12), Request(f"{word}-{number}", prompt, params, ends)))
    return sorted(listed, key=lambda pair: pair[0])


@pytest.mark.parametrize("schedule", range(SCHEDULES))
def test_late_reads_change_no_answer(hybrid: Engine, schedule: int) -> None:
    """Arrivals, prefix hits, ends that are found late, and cancels; drawn every way."""
    wanted = play(hybrid, requests_of(schedule, f"now{schedule}"))
    static, before = overlap_steps(hybrid, V4_SHAPES), hybrid.stats()
    try:
        found = play(hybrid, requests_of(schedule, f"late{schedule}"))
        listed = requests_of(schedule, f"cut{schedule}")
        cut = play(hybrid, listed, [(each.request_id, 3) for _, each in listed[::3]])
    finally:
        release_steps(executor_of(hybrid))
    for answer, other, ended in zip(wanted, found, cut, strict=True):
        assert answer.tokens == other.tokens and answer.finish == other.finish
        assert [one.token for one in answer.logprobs] == [one.token for one in other.logprobs]
        assert [one.logprob for one in answer.logprobs] == pytest.approx(
            [one.logprob for one in other.logprobs], abs=1e-9
        )
        if ended.finish is FinishReason.CANCELLED:
            assert ended.tokens == other.tokens[: len(ended.tokens)]
        else:
            assert ended.tokens == other.tokens and ended.finish == other.finish
    after = hybrid.stats()
    assert after.overlapped_steps - before.overlapped_steps > 5
    if schedule == 0:  # what it means to be about is in it
        assert {answer.finish for answer in found} == {FinishReason.LENGTH, FinishReason.STOP}
        assert any(answer.finish is FinishReason.CANCELLED for answer in cut)
        assert {HISTORY, OP_BY_OP} <= set(after.step_waits)
        assert {Phase.DECODE, Phase.MIXED} <= set(static.replays)
        assert {"history", "bias", "min_tokens"} <= set(static.draws)


def test_captured_draws_change_no_answer(hybrid: Engine) -> None:
    """Requests that ask for no more than a temperature and filters are drawn by graphs alone."""
    rng = random.Random(7)
    listed = []
    for number in range(8):
        params = SamplingParams(
            temperature=0.0 if number < 3 else 1.3,
            top_k=(0, 0, 40)[number % 3],
            top_p=(1.0, 0.8)[number % 2],
            seed=number,
            max_tokens=6 + number,
        )
        prompt = tuple(rng.randrange(3, 256) for _ in range(rng.randrange(1, 50)))
        listed.append((number // 3 * 9, f"{number}", prompt, params))

    def answers(word: str) -> list[tuple[int, ...]]:
        made = [(turn, Request(word + name, *rest)) for turn, name, *rest in listed]
        return [tuple(answer.tokens) for answer in play(hybrid, made)]

    wanted, before = answers("now"), hybrid.stats().step_draws
    static = overlap_steps(hybrid, V4_SHAPES)
    try:
        assert answers("graph") == wanted and before == {}
        assert hybrid.stats().step_draws == static.draws
        assert set(static.draws) <= {"likeliest", "captured", "uneven"}
        assert min(static.draws["likeliest"], static.draws["captured"]) > 3
    finally:
        release_steps(executor_of(hybrid))


def test_an_executor_reads_by_itself_what_a_plan_asks_for(
    hybrid: Engine, late: StaticSteps
) -> None:
    """Whoever submits two plans gets what the engine gets, which asks before it submits."""
    scheduler, executor = hybrid.scheduler, executor_of(hybrid)
    requests = [request for _, request in requests_of(3, "by-itself")]
    wanted = play(hybrid, [(0, each) for _, each in requests_of(3, "engine")])
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        hybrid.submit(request)
    while scheduler.has_work:
        plan = scheduler.schedule() if scheduler.awaiting < 2 else None
        if plan is not None:
            executor.submit(plan)
        if scheduler.awaiting == 2 or plan is None:
            for output in scheduler.commit(executor.collect()):
                take(answers[output.request_id], output)
    assert [each.tokens for each in answers.values()] == [each.tokens for each in wanted]


class Counting:
    """Allows one id, which says how many it was told of."""

    fault = ""

    def __init__(self, told: int) -> None:
        self.told = told

    def allowed(self, ahead: Sequence[int]) -> npt.NDArray[np.bool_]:
        return np.arange(256) == 3 + self.told + len(ahead)

    def accept(self, tokens: Sequence[int]) -> None:
        self.told += len(tokens)


def test_a_grammar_is_told_before_the_next_draw(hybrid: Engine, late: StaticSteps) -> None:
    executor_of(hybrid).use_grammars(lambda spec, told: Counting(len(told)))
    params = SamplingParams(temperature=0.0, max_tokens=9, grammar=GrammarSpec("regex", "a+"))
    before = Counter(hybrid.stats().step_waits)
    hybrid.scheduler.add(Request("counting", (5, 6, 7), params))  # past the engine's own library
    answer = Answer()
    while hybrid.has_work:
        for output in hybrid.step()[0]:
            take(answer, output)
    assert answer.tokens == list(range(3, 12))
    assert Counter(hybrid.stats().step_waits) - before == {GRAMMAR: 8}


def test_nan_that_is_read_late_ends_its_request_alone(tiny: Path, rng: random.Random) -> None:
    """The step behind, which has it too, is launched by then; its place is found all the same."""
    engine, faults = watched(tiny)
    good = [[rng.randrange(3, BAD) for _ in range(n)] for n in (5, 11, 9)]
    want = [answer.tokens for answer in ask(engine, good, GREEDY)]
    poison_embedding(engine)
    overlap_steps(engine, SHAPES, again)
    to_bad = SamplingParams(temperature=0.0, max_tokens=8, allowed_token_ids=(BAD,))
    *answers, broken = ask(engine, [*good, good[0]], [GREEDY] * 3 + [to_bad])
    assert [answer.tokens for answer in answers] == want
    assert broken.finish is FinishReason.ERROR and broken.tokens == [BAD]
    assert engine.stats().overlapped_steps > 4
    assert len(faults) == 1 and "first at embed (before the first layer" in faults[0].text


def test_nan_of_a_request_that_left_is_nobodys(tiny: Path) -> None:
    """Cancelled while its step runs; the step behind gives its slot away before the NaN is read."""
    engine, faults = watched(tiny, concurrency=1)
    want = [answer.tokens for answer in ask(engine, [[5, 6]], GREEDY)]
    poison_embedding(engine)
    overlap_steps(engine, (*decode(1), StepGraph(phase="chunk", tokens=8, runs=1)), again)
    to_bad = SamplingParams(temperature=0.0, max_tokens=8, allowed_token_ids=(BAD,))
    engine.submit(Request("gone", (5, 6), to_bad))
    outputs, _ = engine.step()
    assert [output.tokens for output in outputs] == [(BAD,)] and engine.scheduler.awaiting == 1
    engine.cancel(["gone"])
    assert [answer.tokens for answer in ask(engine, [[5, 6]], GREEDY)] == want
    assert not faults and engine.stats().non_finite == 0


def test_memory_that_lacks_behind_an_unread_step(tiny: Path, rng: random.Random) -> None:
    engine, faults = watched(tiny)
    prompts = [[rng.randrange(3, BAD) for _ in range(n)] for n in (5, 11, 9)]
    want = [answer.tokens for answer in ask(engine, prompts, GREEDY)]
    overlap_steps(engine, SHAPES, again)
    executor = executor_of(engine)
    hungry = Hungry(engine, lambda runs: executor.unread and not hungry.failed)
    assert [answer.tokens for answer in ask(engine, prompts, GREEDY)] == want
    assert len(hungry.failed) == 1 == engine.stats().abandoned_steps
    assert {fault.kind for fault in faults} == {"out_of_memory"}
