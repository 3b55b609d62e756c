"""Decode graphs against eager steps: buckets, padding rows, stale table entries, unsampled rows.

Without a card a replay runs the model on the bucket's own buffers, so everything but the capture
itself is judged here; on a card (``-m gpu``) the real graphs are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import ask, start

from metainfer.core.request import SamplingParams
from metainfer.core.step import (
    NewRequest,
    PageGrant,
    Phase,
    RankTokens,
    Segment,
    StepPlan,
    TokenRun,
)
from metainfer.engine.engine import Engine
from metainfer.executor import graphs
from metainfer.executor.local import LocalExecutor

BUCKETS = (4, 2, 1)


class _Replay:
    """Stands for a captured graph: the model once more over the same buffers."""

    def __init__(self, step: Any, out: torch.Tensor) -> None:
        self.step, self.out = step, out

    def replay(self) -> None:
        self.out.copy_(self.step())


class Recomputed(graphs.DecodeGraphs):
    """`DecodeGraphs` on CPU."""

    @torch.inference_mode()
    def capture(self, bucket: int) -> None:
        parts, inputs = self._parts, self._buffers(bucket)
        ops = parts.ops.phase(Phase.DECODE)

        def step() -> torch.Tensor:
            hidden = parts.model.forward(inputs, parts.store.layers, ops)
            logits: torch.Tensor = parts.model.logits(hidden, inputs, ops)
            return logits

        out = step()
        self._captured[bucket] = graphs._Captured(_Replay(step, out), inputs, out)  # type: ignore


def executor_of(engine: Engine) -> LocalExecutor:
    assert engine._executor is not None
    return engine._executor


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-mistral"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = start(
        f"random:{request.param}",
        dtype="float64",
        allow_fallback=("all",),
        context=200,
        concurrency=6,
        chunk_tokens=32,
    )
    yield made
    made.close()


def with_graphs(engine: Engine) -> graphs.DecodeGraphs:
    executor = executor_of(engine)
    made = Recomputed(executor._parts)
    for bucket in BUCKETS:
        made.capture(bucket)
    return made


def padding_is_harmless(made: graphs.DecodeGraphs, tokens: int) -> None:
    """Each padding row is one token on page 0 that writes nothing, whatever stood there before."""
    inputs = made._captured[min(bucket for bucket in BUCKETS if bucket >= tokens)].inputs
    assert (inputs.context_lens[tokens:] == 1).all() and (inputs.positions[tokens:] == 0).all()
    for group in inputs.groups:
        assert (group.slots[tokens:] == -1).all() and (group.page_table[tokens:, 0] == 0).all()


def test_graphs_give_the_eager_answers(engine: Engine, rng: random.Random) -> None:
    """Batches above, at and below the buckets; contexts that shrink leave stale entries behind."""
    prompts = [[rng.randrange(3, 300) for _ in range(n)] for n in (120, 3, 60, 1, 33, 9)]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=9 + 3 * i, logprobs=1)
        for i, t in enumerate((0.0, 0.8, 0.0, 0.9, 0.0, 0.7))
    ]
    executor, replayed = executor_of(engine), []
    eager = ask(engine, prompts, params) + ask(engine, prompts[1:3], params[1:3])
    made = with_graphs(engine)
    run = made.run

    def spy(host: Any) -> Any:
        logits = run(host)
        tokens = len(host.ids)
        replayed.append(None if logits is None else tokens)
        if logits is not None:
            padding_is_harmless(made, tokens)
        return logits

    made.run = spy  # type: ignore[method-assign]
    executor._graphs = made
    try:
        found = ask(engine, prompts, params) + ask(engine, prompts[1:3], params[1:3])
    finally:
        executor._graphs = None
    assert {None, 1, 2, 3, 4} <= set(replayed)  # beyond every bucket, full ones, padded ones
    assert [answer.tokens for answer in found] == [answer.tokens for answer in eager]


def test_a_graph_step_with_a_row_that_samples_nothing(engine: Engine) -> None:
    """A prompt's chunk of one token may stand among decodes; it takes no row of the logits."""
    executor = LocalExecutor(executor_of(engine)._parts)
    groups = executor._parts.groups
    params = SamplingParams(temperature=0.0)

    def step() -> list[tuple[int, ...]]:
        new = tuple(
            NewRequest(f"n{slot}", slot, 0, prompt, len(prompt), 0, params)
            for slot, prompt in enumerate(((7, 8), (9,), (30,)))
        )
        grants = tuple(
            PageGrant(slot, group.index, 0, (slot + 1,)) for slot in range(3) for group in groups
        )
        runs = (
            TokenRun(0, 0, (7,), 0, 0, False),
            TokenRun(1, 0, (9,), 1, 0, True),
            TokenRun(2, 0, (30,), 1, 0, True),
        )
        segment = Segment(Phase.DECODE, "single", (RankTokens(runs),))
        result = executor.execute(StepPlan(0, (segment,), new, grants))
        executor._slots.apply(StepPlan(1, (), released=(0, 1, 2)))
        return [run.tokens for run in result.runs]

    eager = step()
    executor._graphs = with_graphs(engine)
    assert step() == eager
    assert eager[0] == () and len(eager[1]) == len(eager[2]) == 1 and eager[1] != eager[2]


@pytest.mark.gpu
def test_gpu_graphs_against_eager(rng: random.Random) -> None:
    """On a card, bit for bit: the same kernels on the same shapes, replayed or launched."""
    made = start("random:qwen3-8b?layers=2", platform="cuda", context=2048, concurrency=4)
    executor = executor_of(made)
    held = executor._graphs
    assert held is not None, "no graph was captured"
    prompts = [[rng.randrange(3, 150000) for _ in range(n)] for n in (700, 3, 129, 64)]
    params = [SamplingParams(temperature=0.0, max_tokens=40, logprobs=1)] * 4
    captured = ask(made, prompts, params)
    scheduled, logits = held._captured[4], held._captured[4].logits.clone()
    with torch.inference_mode():
        ops = executor._parts.ops.phase(Phase.DECODE)
        scheduled.graph.replay()
        logits = scheduled.logits.clone()
        hidden = executor._parts.model.forward(scheduled.inputs, executor._parts.store.layers, ops)
        eager = executor._parts.model.logits(hidden, scheduled.inputs, ops)
    assert torch.equal(logits, eager)
    assert all(len(answer.tokens) == 40 for answer in captured)
    made.close()
