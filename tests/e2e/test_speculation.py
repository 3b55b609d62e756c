"""Drafts change no token: random acceptance, chunks, neighbours, preemption, hits, pages, lateness.

Float64 with random weights, so that ties do not occur and a changed sum shows. The reference runs
each request alone, token by token, in one chunk, without a prefix cache. `SCHEDULES=500 pytest ...`
runs that many schedules for each family.
"""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ask, start
from speculation import (
    DEEPEST,
    FAMILIES,
    Family,
    Mixed,
    alone,
    drafted_by,
    expected,
    play,
    random_engine,
    requests,
    same,
)
from torch import Tensor

from metainfer.core.request import SamplingParams
from metainfer.core.step import Phase, RunResult, TokenRun
from metainfer.engine.engine import Engine
from metainfer.executor.local import LocalExecutor
from metainfer.executor.model_drafts import DraftStarts, DraftStep, propose
from metainfer.scheduler.drafting import Drafting

SCHEDULES = int(os.environ.get("SCHEDULES", "12"))
PER_ENGINE = 4


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> str | Path:
    return family.make(tmp_path_factory.mktemp(family.name))


@pytest.mark.timeout(600 + 12 * SCHEDULES)
def test_schedules_with_drafts_change_no_token(
    family: Family, model: str | Path, rng: random.Random
) -> None:
    lone = alone(family, model)
    seen = dict.fromkeys(("accepted", "refused", "hits", "preempted", "cancelled", "late"), 0)
    engine, drafts = None, Mixed(rng, family.vocab)
    for number in range(SCHEDULES):
        if engine is None or number % PER_ENGINE == 0:
            engine = random_engine(rng, family, model, number // PER_ENGINE)
            drafted_by(engine, drafts)
            stem = [rng.randrange(3, family.vocab) for _ in range(family.longest[0])]
            before = 0
        prompts, params = requests(rng, family, stem)
        wanted = [expected(lone, *each) for each in zip(prompts, params, strict=True)]
        for prompt, each, answer in zip(prompts, params, wanted, strict=True):
            drafts.learn(prompt, each, answer.tokens)
        late = number % 3 == 1
        leaving = {0: rng.randrange(1, 12)} if number % 4 == 2 else {}
        answers = play(
            engine, prompts, params, late=late, cancel=leaving, preempt=lambda: rng.random() < 0.05
        )
        for answer, meant in zip(answers, wanted, strict=True):
            same(answer, meant)
            seen["hits"] += answer.cached_tokens > 0
        counters = engine.scheduler.counters
        seen["preempted"] += counters.preemptions - before
        before = counters.preemptions
        seen["late"] += late
        seen["cancelled"] += bool(leaving)
        if number % PER_ENGINE == PER_ENGINE - 1:
            seen["accepted"] += counters.accepted_drafts
            seen["refused"] += counters.drafted_tokens - counters.accepted_drafts
    assert min(seen.values()) > 0, seen  # the schedules exercised what they are about


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_depth_gives_the_same_answer(
    family: Family, model: str | Path, temperature: float, rng: random.Random
) -> None:
    """Depths 0 to 7, right, half right and wrong: tokens, ranks and log-probabilities."""
    lone = alone(family, model)
    prompt = [rng.randrange(3, family.vocab) for _ in range(12)]
    params = SamplingParams(
        temperature=temperature, seed=5, max_tokens=30, logprobs=4, frequency_penalty=0.3
    )
    wanted = expected(lone, prompt, params)
    assert len(set(wanted.tokens)) > 5
    engine = start(model, **family.wish(draft=f"ngram:{DEEPEST}"))
    for depth in range(DEEPEST + 1):
        for accuracy in (1.0, 0.5, 0.0) if depth else (0.0,):
            drafts = Mixed(rng, family.vocab, accuracy)
            drafts.most = depth
            drafts.learn(prompt, params, wanted.tokens)
            drafted_by(engine, drafts if depth else None)
            engine.scheduler.domains[0].kv.flush()
            steps = engine.scheduler.counters.steps
            (answer,) = play(engine, [prompt], [params])
            same(answer, wanted)
            steps = engine.scheduler.counters.steps - steps
            if accuracy == 1.0:  # drafts shorten the way by what they promise
                assert steps == 1 + -(-29 // (1 + depth))


class Seen:
    """A model that drafts: it has seen the answers, and checks what it is shown of each segment.

    `texts`: prompt and greedy answer of each request.
    """

    group = 0

    def __init__(self, rng: random.Random, engine: Engine, texts: dict[str, list[int]]) -> None:
        executor = engine._executor
        assert isinstance(executor, LocalExecutor)
        self.rng, self.texts, self.executor = rng, texts, executor
        self.vocab = executor._parts.vocab
        self.made = self.drawn = self.chunks = 0
        self.runs: list[tuple[TokenRun, RunResult]] = []  # of the segment

    def noted(self, drafter: Any, *given: Any) -> None:
        """`model_drafts.propose`, with a look at what it is given."""
        _, _, rank, results, *_ = given
        self.runs = list(zip(rank.runs, results, strict=True))
        propose(drafter, *given)
        held = [self.executor._slots.states[run.slot].proposals for run, _ in self.runs]
        assert [len(each) for each in held] == [run.proposals for run, _ in self.runs]

    def read(self, step: DraftStep) -> Tensor:
        every_row = dataclasses.replace(step.inputs, logit_rows=None)
        model = self.executor._parts.model
        best = model.logits(step.hidden, every_row, step.ops).argmax(-1).tolist()
        positions, at = step.inputs.positions.tolist(), 0
        for run, result in self.runs:
            text = self.texts[self.executor._slots.states[run.slot].request_id]
            stop, end = at + len(run.tokens), at + len(run.tokens)
            if result.tokens:  # the row that drew, and what is behind it
                end -= run.drafts - result.accepted_drafts
                assert best[end - 1] == text[positions[end - 1] + 1]
                self.drawn += 1
            else:
                assert run.proposals == 0
                self.chunks += 1
            following = text[run.start + 1 :][: end - at]
            assert step.next_ids[at : at + len(following)].tolist() == following
            assert not step.next_ids[end:stop].any()
            assert positions[at:stop] == list(range(run.start, run.end))
            at = stop
        return torch.arange(len(positions))

    def propose(self, starts: DraftStarts) -> list[list[int]]:
        asking = [(run, result) for run, result in self.runs if run.proposals]
        assert starts.wanted == tuple(run.proposals for run, _ in asking)
        found = []
        for n, (run, result) in enumerate(asking):
            wanted, position = run.proposals, int(starts.positions[n])
            assert position == run.end - 1 - run.drafts + result.accepted_drafts
            table = self.executor._slots.page_tables[self.group][run.slot]
            pages = starts.pages[n].tolist()
            assert pages == table[: len(pages)].tolist()
            size = self.executor._parts.groups[self.group].page_tokens
            assert len(pages) * size > position + wanted - 1
            text = self.texts[self.executor._slots.states[run.slot].request_id]
            right = (text[position + 2 :][:wanted] + [0] * wanted)[:wanted]
            found.append([t if self.rng.random() < 0.7 else (t + 1) % self.vocab for t in right])
            self.made += wanted
        return found


@pytest.mark.parametrize("late", [False, True])
def test_the_devices_own_drafts(
    family: Family,
    model: str | Path,
    late: bool,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The seam for a model that drafts (ADR 0010): plans carry placeholders."""
    lone = alone(family, model)
    prompts = [[rng.randrange(3, family.vocab) for _ in range(n)] for n in (3, 40, 1, 25, 16)]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (30, 25, 20, 2, 1)]
    wanted = [expected(lone, *each) for each in zip(prompts, params, strict=True)]
    wish = family.wish(concurrency=3, chunk_tokens=24, draft="ngram:5")
    engine = start(model, **wish)
    executor, scheduler = engine._executor, engine.scheduler
    assert isinstance(executor, LocalExecutor)
    texts = {
        f"s{i}": prompt + answer.tokens
        for i, (prompt, answer) in enumerate(zip(prompts, wanted, strict=True))
    }
    drafter = Seen(rng, engine, texts)
    monkeypatch.setattr("metainfer.executor.local.propose", drafter.noted)
    executor._parts = dataclasses.replace(executor._parts, model_drafts=drafter)
    scheduler.drafting = Drafting(dataclasses.replace(scheduler.config, model_drafts=True), None)
    for answer, meant in zip(play(engine, prompts, params, late=late), wanted, strict=True):
        same(answer, meant)
    counters = scheduler.counters
    assert 0 < counters.accepted_drafts < counters.drafted_tokens <= drafter.made
    assert drafter.drawn and drafter.chunks


def test_the_ngram_drafter_serves(family: Family, model: str | Path) -> None:
    """The drafter that users get, on prompts that repeat: fewer steps, the same tokens."""
    engine = start(model, **family.wish(draft="ngram:4"))
    source = engine.scheduler.drafting.source
    prompts = [[5, 6, 7, 8, 9] * 5, [11, 12] * 9, [3, 4, 5]]
    few = dict.fromkeys((11, 12, 13), 60.0)  # a text of three ids repeats itself, somewhat
    params = SamplingParams(temperature=0.0, max_tokens=40, logit_bias=few)
    plain = ask(drafted_by(engine, None), prompts, params)
    steps = engine.stats().steps
    engine.scheduler.domains[0].kv.flush()
    drafted = ask(drafted_by(engine, source), prompts, params)
    for answer, wanted in zip(drafted, plain, strict=True):
        same(answer, wanted)
    stats = engine.stats()
    assert 0 < stats.accepted_drafts < stats.drafted_tokens
    assert stats.steps - steps < steps
    assert source.held == 0, "finished requests are not forgotten"


def test_verify_runs_in_its_own_phase(model: str | Path, family: Family) -> None:
    """Kernels of verify runs are chosen for them; without drafts the phase does not exist."""
    off, on = (start(model, **family.wish(draft=wish)) for wish in (None, "ngram:3"))
    for engine, present in ((off, False), (on, True)):
        assert engine.resolved is not None
        plan = engine.resolved.plan
        assert (Phase.VERIFY.value in plan.phase_layout) is present
        assert any(key.endswith("@verify") for key in plan.ops) is present
        assert plan.draft.depth == (3 if present else 0)


def test_b24_auto_serves_the_same_tokens(family: Family, model: str | Path) -> None:
    """Depths that follow measured times and acceptance: other steps, the same tokens."""
    engine = start(model, **family.wish(draft="auto"))
    assert engine.resolved is not None and engine.resolved.plan.draft.adaptive
    source = engine.scheduler.drafting.source
    prompts = [[5, 6, 7, 8, 9] * 5, [11, 12] * 9]
    few = dict.fromkeys((11, 12, 13), 60.0)  # a text of three ids repeats itself, somewhat
    params = SamplingParams(temperature=0.0, max_tokens=40, logit_bias=few)
    plain = ask(drafted_by(engine, None), prompts, params)
    engine.scheduler.domains[0].kv.flush()
    engine.scheduler.drafting = Drafting(engine.scheduler.config, source)
    drafted = ask(engine, prompts, params)
    for answer, wanted in zip(drafted, plain, strict=True):
        same(answer, wanted)
    assert engine.scheduler.counters.drafted_tokens > 0
    assert engine.stats().draft_gain is not None
