"""Steps launched before the one ahead of them was read: the same answers, whatever comes between.

On CPU a recorded step stands for a card's graph, and the one behind it really runs, on the tokens
that lie on the device, before anything of the one ahead came to the host. All that a replay made is
overwritten by the next, so what is read late has to have been copied before.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import v4
from harness import Answer, save_tiny, start, take
from statics import decode, executor_of, overlap_steps, record

from metainfer.core.plan import StepGraph
from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.core.step import Phase
from metainfer.engine.engine import Engine

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
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("v4-overlap")
    v4.save(v4.tiny(35, **THREE), folder)  # one layer of each kind
    return start(
        folder,
        dtype="float64",
        context=96,
        layouts=LAYOUTS,
        ops=dict.fromkeys(STATIC, "torch-static"),
        concurrency=4,
        chunk_tokens=28,
        page_tokens=16,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-overlap")
    save_tiny("llama", folder, 5)
    return folder


Say = dict[int, Callable[[], None]]


def play(
    engine: Engine,
    requests: Sequence[tuple[int, Request]],
    cancels: Sequence[tuple[str, int]] = (),
) -> dict[str, Answer]:
    """Submit each request at its turn; cancel some once they have so many tokens."""
    answers = {request.request_id: Answer() for _, request in requests}
    waiting, ends, turn, deepest = list(requests), dict(cancels), 0, 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= turn:
            engine.submit(waiting.pop(0)[1])
        for name in [name for name, count in ends.items() if len(answers[name].tokens) >= count]:
            del ends[name]
            for output in engine.cancel([name]):
                take(answers[name], output)
        for output in engine.step()[0]:
            take(answers[output.request_id], output)
        deepest, turn = max(deepest, engine.scheduler.awaiting), turn + 1
        assert turn < 5000, "the engine does not come to an end"
    engine.scheduler.audit()
    return answers


def requests_of(rng: random.Random, turn: str) -> list[tuple[int, Request]]:
    """Random requests of every kind that a draw can depend on, in the order of their turns."""
    word = [rng.randrange(3, 256) for _ in range(6)]
    listed = []
    for number in range(9):
        kind = rng.randrange(6)
        more: dict[str, Any] = {}
        if kind == 1:
            more = {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
        elif kind == 2:
            more = {"logprobs": 2, "logit_bias": {7: 4.0}}
        elif kind == 3:
            more = {"min_tokens": 5, "stop_token_ids": tuple(rng.sample(range(256), 120))}
        elif kind == 4:
            more = {"bad_words": ((7,), (rng.randrange(256), rng.randrange(256)))}
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.0, 1.3)),
            top_k=rng.choice((0, 40)),
            seed=number,
            max_tokens=rng.randrange(1, 30),
            **more,
        )
        prompt = [*(word * 9)[: rng.randrange(1, 50)], rng.randrange(3, 256)]
        eos = tuple(rng.sample(range(256), rng.choice((0, 6))))
        name = f"{turn}-{number}"
        listed.append((rng.randrange(12), Request(name, tuple(prompt), params, eos)))
    return sorted(listed, key=lambda pair: pair[0])


@pytest.fixture
def captured_sampler(hybrid: Engine) -> None:
    """The reference sampler as if it could be captured: likeliest tokens come out of the graph."""
    table = executor_of(hybrid)._parts.ops
    table.choices = tuple(
        dataclasses.replace(c, impl=dataclasses.replace(c.impl, graph_safe=True))
        if c.request.op == "sample"
        else c
        for c in table.choices
    )


@pytest.mark.parametrize("schedule", range(SCHEDULES))
def test_late_reads_change_no_answer(hybrid: Engine, captured_sampler: None, schedule: int) -> None:
    """Arrivals, prefix hits, ends that are found late, and cancels; drawn every way."""
    executor, steps = executor_of(hybrid), hybrid._steps
    assert steps is not None
    wanted = play(hybrid, requests_of(random.Random(schedule), f"now{schedule}"))
    before = hybrid.stats()
    static = overlap_steps(hybrid, V4_SHAPES, record)
    try:
        found = play(hybrid, requests_of(random.Random(schedule), f"late{schedule}"))
        names = random.Random(schedule).sample(sorted(found), 4)
        again_ = [(at, dataclasses_of(each, "cut")) for at, each in
                  requests_of(random.Random(schedule), f"late{schedule}")]  # fmt: skip
        cut = play(hybrid, again_, [(f"cut{name}", 3) for name in names])
    finally:
        executor._parts = dataclasses.replace(executor._parts, graphs=(), overlap=False)
        executor._static = executor._tables = None
        steps._ahead = False
    for (name, answer), (late, other) in zip(wanted.items(), found.items(), strict=True):
        assert answer.tokens == other.tokens and answer.finish == other.finish, (name, late)
        assert [one.token for one in answer.logprobs] == [one.token for one in other.logprobs]
        assert [one.logprob for one in answer.logprobs] == pytest.approx(
            [one.logprob for one in other.logprobs], abs=1e-9
        )
        ended = cut[f"cut{late}"]
        whole = ended.finish is not FinishReason.CANCELLED
        assert ended.tokens == other.tokens[: None if whole else len(ended.tokens)]
    assert any(answer.finish is FinishReason.CANCELLED for answer in cut.values())
    after = hybrid.stats()
    assert after.overlapped_steps - before.overlapped_steps > 20
    assert set(after.step_waits) <= {"history", "op_by_op"}
    assert {Phase.DECODE, Phase.MIXED} <= set(static.replays)


def dataclasses_of(request: Request, word: str) -> Request:
    """The same request under another name."""
    return Request(
        f"{word}{request.request_id}", request.prompt, request.params, request.eos_token_ids
    )
