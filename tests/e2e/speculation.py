"""Speculative runs of small engines: who drafts, what is asked, and what must come out."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import v4
from harness import Answer, ask, save_tiny, start, take

from metainfer.core.intent import Intent
from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.engine.engine import Engine
from metainfer.engine.machine import open_machine
from metainfer.executor.local import LocalExecutor
from metainfer.planner.opening import open_model

DEEPEST = 7


@dataclass(frozen=True, slots=True)
class Family:
    """A model that the invariance tests run on; `make` gives its reference, perhaps in a folder.

    `pages`: page sizes to draw from. `longest`: tokens of the longest prompt and of the longest
    answer. `full`: the tightest pool is that many times the pages of one sequence of the whole
    context.
    """

    name: str
    make: Callable[[Path], str | Path]
    vocab: int = 131
    context: int = 96
    pages: tuple[int, ...] = (4, 8, 16)
    longest: tuple[int, int] = (70, 50)
    full: float = 1.1
    layouts: Mapping[str, str] = field(default_factory=dict)

    def wish(self, **intent: Any) -> dict[str, Any]:
        """An intent for this family, in float64."""
        fixed = {"dtype": "float64", "context": self.context, "layouts": self.layouts}
        return {**fixed, **intent}


def saved(family: str, seed: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save_tiny(family, folder, seed)
        return folder

    return make


def saved_v4(folder: Path) -> Path:
    """One layer of each kind: windows, compressed entries of both ratios, rows of both rings."""
    layers = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
    v4.save(v4.tiny(21, **layers), folder)
    return folder


FAMILIES = (
    Family("llama", saved("llama", 0)),
    Family("qwen2", saved("qwen2", 1)),
    Family("mistral", saved("mistral", 2)),
    Family(
        "deepseek-v4",
        saved_v4,
        vocab=256,
        pages=(16, 32),
        layouts={"kv": "latent@1", "index": "index@1"},  # not rounded: sums may differ at 1e-15
    ),
)


class Mixed:
    """Proposes a random number of tokens, a random part of them right; it has seen the answers.

    Answers are found by prompt and parameters. `accuracy` None draws one for each request.
    """

    def __init__(self, rng: random.Random, vocab: int, accuracy: float | None = None) -> None:
        self._rng, self._vocab, self._accuracy = rng, vocab, accuracy
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._accuracies: dict[str, float] = {}
        self.most = 0  # when set: always that many

    def learn(self, prompt: Sequence[int], params: SamplingParams, answer: Sequence[int]) -> None:
        self._answers[_key(prompt, params)] = list(answer)

    def propose(self, request: Request, tokens: Sequence[int], limit: int) -> list[int]:
        rng = self._rng
        accuracy = self._accuracy
        if accuracy is None:
            drawn = rng.choice((0.0, 0.4, 0.8, 1.0))
            accuracy = self._accuracies.setdefault(request.request_id, drawn)
        answer = self._answers.get(_key(request.prompt, request.params), [])
        done = len(tokens) - len(request.prompt)
        count = min(self.most, limit) if self.most else rng.randint(0, limit)
        right = answer[done : done + count]
        right += [rng.randrange(self._vocab) for _ in range(count - len(right))]
        return [t if rng.random() < accuracy else rng.randrange(self._vocab) for t in right]

    def forget(self, request_id: str) -> None: ...


def _key(prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    return (*prompt, hash(repr(params)))


def drafted_by(engine: Engine, source: Any) -> Engine:
    """The engine with another source of drafts; None: it decodes token by token."""
    engine.scheduler.drafting.source = _Silent() if source is None else source
    return engine


class _Silent:
    """Never has a draft. (Without a source the device would be taken to propose.)"""

    def propose(self, request: Any, tokens: Any, limit: int) -> tuple[int, ...]:
        return ()

    def forget(self, request_id: str) -> None: ...


def alone(family: Family, model: str | Path) -> Engine:
    """One request at a time, whole prompts, no cache, no drafts: what all is held against."""
    return start(model, **family.wish(concurrency=1, prefix_cache=False))


def random_engine(rng: random.Random, family: Family, model: str | Path, number: int) -> Engine:
    """Depth, page, chunk and batch drawn; by turns the pool is too small for all at once, and one
    in three has no prefix cache."""
    page = rng.choice(family.pages)
    running = rng.randrange(3, 7)
    chunk = max(running, rng.choice((5, 16, 33, family.context)))
    sizes = {"page_tokens": page, "chunk_tokens": chunk}
    pages, states = (pool_bytes(family, model, concurrency=n, **sizes) for n in (1, running))
    full = 40.0 if number % 2 else rng.choice((family.full, family.full * 1.3))
    wish = family.wish(
        concurrency=running,
        kv_bytes=int(pages[0] * full) + states[1],
        prefix_cache=number % 3 < 2,
        draft=f"ngram:{rng.randint(1, DEEPEST)}",
        **sizes,
    )
    return start(model, **wish)


def pool_bytes(family: Family, model: str | Path, **intent: Any) -> tuple[int, int]:
    """Bytes of pages and of slot states for that many sequences of the whole context."""
    wish = Intent(model=str(model), **family.wish(**intent))
    groups = open_machine().resolve(open_model(str(model)), wish).plan.kv_groups
    pages = sum(group.pages * group.page_bytes for group in groups)
    return pages, sum(group.allocated_bytes for group in groups) - pages


def requests(
    rng: random.Random, family: Family, stem: Sequence[int]
) -> tuple[list[list[int]], list[SamplingParams]]:
    """A few prompts, some of which begin like `stem`; greedy and seeded, with penalties."""
    prompt_limit, answer_limit = family.longest
    prompts, params = [], []
    for _ in range(rng.randrange(3, 7)):
        shared = list(stem[: rng.choice((0, 0, prompt_limit // 4, prompt_limit // 2))])
        tail = rng.randrange(1, prompt_limit // 2)
        prompts.append(shared + [rng.randrange(3, family.vocab) for _ in range(tail)])
        params.append(
            SamplingParams(
                temperature=rng.choice((0.0, 0.9)),
                top_k=rng.choice((0, 5)),
                seed=rng.randrange(1000),
                max_tokens=rng.randrange(1, answer_limit),
                logprobs=rng.choice((None, 0, 3)),
                prompt_logprobs=rng.choice((None, None, None, 0)),
                frequency_penalty=rng.choice((0.0, 0.5)),
                repetition_penalty=rng.choice((1.0, 1.2)),
                stop_token_ids=rng.choice(((), (rng.randrange(family.vocab),))),
            )
        )
    return prompts, params


def play(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    late: bool = False,
    cancel: dict[int, int] | None = None,
    preempt: Callable[[], bool] = lambda: False,
) -> list[Answer]:
    """Run to the end, one or two plans deep; `cancel`: request -> turn at which its user leaves.

    `preempt` is asked before each turn: whether the last in order shall make room, needed or not
    (never while a result of it is awaited: the scheduler would not do it then).

    After every turn the account is sound and the executor's page tables are the account's.
    """
    names = [f"s{number}" for number in range(len(prompts))]
    answers = {name: Answer() for name in names}
    for name, prompt, wanted in zip(names, prompts, params, strict=True):
        engine.submit(Request(name, tuple(prompt), wanted))
    scheduler, executor = engine.scheduler, engine._executor
    assert isinstance(executor, LocalExecutor)
    leaving = {names[number]: turn for number, turn in (cancel or {}).items()}
    for turn in range(20_000):
        for output in engine.cancel([name for name, when in leaving.items() if when == turn]):
            take(answers[output.request_id], output)
        if not scheduler.has_work:
            break
        (domain,) = scheduler.domains
        if domain.running and not domain.running[-1].in_flight and preempt():
            scheduler._preempt(domain, domain.running.pop())
        plan = scheduler.schedule()
        if plan is not None:
            executor.submit(plan)
        while scheduler.awaiting > (1 if late and plan is not None else 0):
            for output in scheduler.commit(executor.collect()):
                take(answers[output.request_id], output)
        scheduler.audit()
        same_pages(engine)
    assert not scheduler.has_work, "the engine does not come to an end"
    scheduler.audit()  # idle: nothing is held
    return list(answers.values())


def same_pages(engine: Engine) -> None:
    """Live pages of every running sequence are the same in the account and in the executor."""
    executor = engine._executor
    assert isinstance(executor, LocalExecutor)
    entered = {entry.slot for entry in engine.scheduler._build.new}  # not told to it yet
    (domain,) = engine.scheduler.domains
    for slot, account in domain.kv.accounts.items():
        if slot in entered:
            continue
        for i, group in enumerate(domain.kv.paged):
            live, table = account.live[i], account.tables[i]
            held = executor._slots.page_tables[group.index][slot, live : len(table)]
            assert np.array_equal(held, table[live:]), (slot, group.name)


def expected(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Answer:
    """The answer of a request that runs alone."""
    (answer,) = ask(engine, [prompt], params, audit=False)
    return answer


def same(answer: Answer, wanted: Answer) -> None:
    """Equal tokens, end and log-probabilities; of a cancelled answer, equal as far as it goes."""
    if answer.finish is FinishReason.CANCELLED:
        wanted.tokens = wanted.tokens[: len(answer.tokens)]
        wanted.logprobs = wanted.logprobs[: len(answer.logprobs)]
    else:
        assert answer.finish == wanted.finish
    assert answer.tokens == wanted.tokens
    for name in ("logprobs", "prompt_logprobs"):
        if answer.finish is FinishReason.CANCELLED and name == "prompt_logprobs":
            continue
        for got, meant in zip(getattr(answer, name), getattr(wanted, name), strict=True):
            assert (got.token, got.rank) == (meant.token, meant.rank)
            assert abs(got.logprob - meant.logprob) < 1e-6  # reported in float32
            assert [token for token, _ in got.top] == [token for token, _ in meant.top]
