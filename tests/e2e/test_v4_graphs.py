"""DeepSeek-V4's captured steps: nothing comes to the host, nothing lives on between replays.

A step is recorded as torch operators and replayed on the same tensors, all that it made poisoned in
between: what Python decided while it was recorded stays decided, as in a graph of a card. Its
replays must give the bits that its ops give on the same shapes, whatever the scheduler plans.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import v4
from capture import HostReads
from harness import ask, start
from msgspec.structs import replace
from statics import Logits, capture_steps, decode, executor_of, record, release_steps

from metainfer.core.plan import StepGraph
from metainfer.core.request import Request, SamplingParams
from metainfer.core.step import Phase
from metainfer.engine.engine import Engine
from metainfer.executor.graphs import StaticOutput, Step
from metainfer.kernels.table import Trace

THREE = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
LAYOUTS = {"kv": "latent@1", "index": "index@1", "weight": "dense@1", "experts": "experts-dense@1"}
STATIC = ("latent_qkv", "compress", "compress_index", "index_select", "attn_sparse", "moe_experts")
SHAPES = (
    StepGraph(phase="mixed", tokens=28, runs=4),
    StepGraph(phase="chunk", tokens=24, runs=4),
    StepGraph(phase="verify", tokens=12, runs=4),
    *decode(4, 2),
)
SCHEDULES = int(os.environ.get("SCHEDULES", "1"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4-graphs")
    v4.save(v4.tiny(33, **THREE), folder)  # one layer of each kind
    return folder


class Sites(Trace):
    """Which op is running: ``site implementation``."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []

    def wrap(self, function: Any, phase: Phase, site: str, impl: str) -> Any:
        traced = super().wrap(function, phase, site, impl)

        def named(*args: Any, **kwargs: Any) -> Any:
            self.running.append(f"{site} {impl}")
            try:
                return traced(*args, **kwargs)
            finally:
                self.running.pop()

        return named

    def where(self) -> str:
        return self.running[-1] if self.running else "the step itself"


def engine_of(checkpoint: Path, *, static: bool = True, trace: Trace | None = None) -> Engine:
    return start(
        checkpoint,
        trace=trace,
        dtype="float64",
        context=96,
        layouts=LAYOUTS,
        ops=dict.fromkeys(STATIC, "torch-static") if static else {},
        concurrency=4,
        chunk_tokens=28,
        draft="ngram:2",
        page_tokens=16,
    )


def watching(sites: Sites, seen: list[str]) -> Callable[[Step], Any]:
    """A capture that notes what the host reads meanwhile."""

    def capture(step: Step) -> tuple[Any, StaticOutput]:
        step()  # what is made once is made here
        with HostReads(sites.where) as watch:
            out = step()
        seen.extend(watch.found)
        return None, out

    return capture


def test_no_value_of_a_step_comes_to_the_host(checkpoint: Path) -> None:
    """Metadata, model and every op that declares so: the list of exceptions is empty."""
    sites, seen = Sites(), list[str]()
    engine = engine_of(checkpoint, trace=sites)
    capture_steps(executor_of(engine), SHAPES[:-1], watching(sites, seen))
    assert seen == []
    assert {phase for phase, _, _ in sites.calls} >= {Phase(shape.phase) for shape in SHAPES}


def test_where_ops_ask_they_alone_do(checkpoint: Path) -> None:
    """With ops that declare that they ask, every read is inside one of them."""
    sites, seen = Sites(), list[str]()
    engine = engine_of(checkpoint, static=False, trace=sites)
    capture_steps(executor_of(engine), SHAPES[:-1], watching(sites, seen))
    assert engine.resolved is not None
    asking = {
        f"{choice.request.site} {choice.impl.id}"
        for choice in engine.resolved.selection.bundle.choices
        if not choice.impl.graph_safe
    }
    assert seen and {read.partition(" in ")[2] for read in seen} <= asking


class Seen:
    """Proposes what followed before, every third time nonsense, and for a while nothing."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def propose(self, request: Request, tokens: Sequence[int], limit: int) -> list[int]:
        if len(tokens) // 16 % 2:
            return []
        if len(tokens) % 3 == 0:
            return [5] * limit
        known = [text for text in self.texts if text[: len(tokens)] == tokens]
        return known[0][len(tokens) : len(tokens) + limit] if known else []

    def forget(self, request_id: str) -> None: ...


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return engine_of(checkpoint)


@pytest.mark.parametrize("schedule", range(SCHEDULES))
def test_replays_give_the_bits_of_their_ops(engine: Engine, schedule: int) -> None:
    """Random requests, all put back now and then: re-entries, pages that grow, drafts, hits."""
    rng = random.Random(schedule)
    word = [rng.randrange(3, 256) for _ in range(6)]
    prompts = [[*(word * 9)[: rng.randrange(1, 54)], rng.randrange(3, 256)] for _ in range(7)]
    params = [
        SamplingParams(
            temperature=rng.choice((0.0, 0.9)),
            seed=n,
            max_tokens=rng.randrange(8, 40),
            ignore_eos=True,
        )
        for n in range(len(prompts))
    ]
    executor, before = executor_of(engine), engine.stats()
    engine.scheduler.drafting.source = drafts = Seen()

    def put_back(step: int, engine: Engine) -> None:
        if step % 17 == 9:
            engine.scheduler.put_back()

    def run() -> tuple[list[list[int]], list[torch.Tensor]]:
        with Logits(engine) as rows:
            found = ask(engine, prompts, params, before_step=put_back)
        texts = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, found, strict=True)]
        return texts, rows.rows

    plain, _ = run()  # op by op on shapes of its own; later runs find its prefixes
    drafts.texts = plain
    steps = capture_steps(executor, SHAPES, record)
    try:
        with executor.eager():
            eager, rows = run()
        replayed, others = run()
    finally:
        release_steps(executor)
    assert plain == eager == replayed
    assert [len(a) for a in rows] == [len(b) for b in others]
    assert all(torch.equal(a, b) for a, b in zip(rows, others, strict=True))
    assert {Phase.DECODE, Phase.VERIFY} < set(steps.replays)  # and chunks, alone or beside decodes
    after = engine.stats()
    assert after.preemptions > before.preemptions
    assert after.accepted_drafts > before.accepted_drafts


def test_likeliest_tokens_are_part_of_the_step(checkpoint: Path) -> None:
    """Where the sampler can be captured it is not called behind a step, whose own graph takes the
    argmaxes and another one draws."""
    sites = Sites()
    engine = engine_of(checkpoint, trace=sites)
    table = executor_of(engine)._parts.ops
    prompts = [[7, 8, 9], [10, 11], [12], [5, 6, 7, 8, 9]]
    greedy = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (6, 9, 4, 7)]
    drawn = [replace(p, temperature=0.9, seed=3) for p in greedy]
    plain = [[a.tokens for a in ask(engine, prompts, p)] for p in (greedy, drawn)]
    table.choices = tuple(
        dataclasses.replace(c, impl=dataclasses.replace(c.impl, graph_safe=True))
        if c.request.op == "sample"
        else c
        for c in table.choices
    )
    steps = capture_steps(executor_of(engine), decode(4))

    def calls() -> int:
        return sum(n for (phase, site, _), n in sites.calls.items()
                   if (phase, site) == (Phase.DECODE, "sample"))  # fmt: skip

    before = calls()
    assert [a.tokens for a in ask(engine, prompts, greedy)] == plain[0]
    assert steps.replays[Phase.DECODE] > 5 and calls() == before
    assert [a.tokens for a in ask(engine, prompts, drawn)] == plain[1]
    assert steps.draws["captured"] > 5 and calls() == before
    told = [replace(p, presence_penalty=0.5) for p in drawn]
    ask(engine, prompts, told)
    assert steps.draws["history"] > 5 and calls() > before
