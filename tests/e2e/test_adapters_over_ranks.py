"""Adapters over several ranks change no token: pairs cut as their matrices are, in every layout.

Float64. One process that has loaded all of them and computes each request alone is what layouts are
held against (`test_adapters_oracle` holds it against merged weights). Neighbours with other
adapters, chunks, preemption, prefix hits and drafts are part of every schedule.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from harness import Answer, ask, save_tiny, start
from lora_files import ATTENTION, EVERY, Recipe, save_adapter
from speculation import Mixed, drafted_by
from test_invariance import same
from thread_ranks import making_room, ranks_as_threads

from metainfer.core.request import SamplingParams
from metainfer.executor.ranks import RankExecutor

FEW = 6
REQUESTS = int(os.environ.get("RANK_REQUESTS", FEW))  # 200 by hand, of more layouts
VOCAB, PAGE, CHUNK = 131, 16, 33
RECIPES = {
    "sql": Recipe(EVERY, rank=6, alpha=9, rslora=True),
    "law": Recipe(ATTENTION, rank=3, alpha=4, ranks={"q_proj": 5}),
    "tax": Recipe(("v_proj", "up_proj", "down_proj"), rank=2, alpha=7),
}
SHORT = (("uneven", "cp2/dp2"), ("uneven", "cp2/tp2"))
LONG = (
    *(
        ("llama", layout)
        for layout in ("tp2", "2x", "tp4", "tp4cs2", "2xtp2", "cp2/dp2", "cp2/tp2")
    ),
    *(("uneven", layout) for layout in ("tp2", "tp3", "cp3/tp3", "cp4/dp4")),
)
CASES = SHORT if REQUESTS == FEW else SHORT + LONG


@dataclass
class World:
    """A base model with its adapters on disk; what is asked, and what one process says."""

    base: Path
    adapters: dict[str, str]
    prompts: list[list[int]]
    params: list[SamplingParams]
    names: list[str]
    answers: list[Answer]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    @cache
    def of(family: str) -> World:
        folder, rng = tmp_path_factory.mktemp(family), random.Random(family)
        # 9 query heads over 3 KV heads, 81 channels, a vocabulary of 131: nothing divides by two.
        uneven = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
        changes = {**uneven, "intermediate_size": 81} if family == "uneven" else {}
        model = save_tiny("llama", folder / "base", 3, **changes)
        for seed, (name, recipe) in enumerate(RECIPES.items()):
            save_adapter(folder / name, model, recipe, seed)
        adapters = {name: str(folder / name) for name in RECIPES}
        stem = [rng.randrange(3, VOCAB) for _ in range(48)]
        prompts, params, names = [stem[:40]], [SamplingParams(temperature=0.0, max_tokens=2)], [""]
        for number in range(1, REQUESTS):
            tail = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))]
            prompts.append(stem[: rng.choice((0, 32, 48))] + tail)
            names.append(rng.choice(("", *RECIPES)) if number > 3 else ["", *RECIPES][number])
            params.append(
                SamplingParams(
                    temperature=rng.choice((0.0, 0.9)),
                    seed=number,
                    max_tokens=rng.randrange(4, 12),
                    logprobs=0,
                )
            )
        alone = start(
            folder / "base",
            dtype="float64",
            context=128,
            adapters=adapters,
            concurrency=1,
            prefix_cache=False,
        )
        answers = ask(alone, prompts, params, adapters=names)
        return World(folder / "base", adapters, prompts, params, names, answers)

    return of


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "layout"), CASES, ids=["-".join(case) for case in CASES])
def test_layouts_change_no_token(
    family: str, layout: str, world: Callable[[str], World], rng: random.Random
) -> None:
    here = world(family)
    with ranks_as_threads() as groups:
        engine = start(
            here.base,
            dtype="float64",
            context=128,
            parallel=layout,
            adapters=here.adapters,
            concurrency=4,
            page_tokens=PAGE,
            chunk_tokens=CHUNK,
            draft="ngram:3",
        )
        (group,) = groups
        executor, source = engine._executor, Mixed(rng, VOCAB, 0.8)
        assert isinstance(executor, RankExecutor)
        drafted_by(engine, source)
        for prompt, each, answer in zip(here.prompts, here.params, here.answers, strict=True):
            source.learn(prompt, each, answer.tokens)
        answers: list[Answer] = []
        act = making_room(rng)
        for part in (slice(0, 1), slice(1, None)):  # the first leaves its prompt to be found
            answers += ask(
                engine,
                here.prompts[part],
                here.params[part],
                adapters=here.names[part],
                before_step=lambda step, engine: act(engine),
            )
        moved, held = executor.moved_bytes, group.call("held_bytes")
    for answer, wanted in zip(answers, here.answers, strict=True):
        same(answer, wanted)
    # Whoever has no adapter finds what the first left; nobody else does.
    assert any(answer.cached_tokens for answer in answers)
    assert engine.stats().preemptions > 0 and engine.stats().accepted_drafts > 0
    assert engine.resolved is not None
    planned = sum(row.bytes for row in engine.resolved.plan.ledger if row.kind == "weights")
    # Biases of `o` are held by the first rank of a sum, which adds them.
    biases = 3 * 8 * engine.resolved.arch.costs().hidden
    own = engine.resolved.plan.layouts[0]
    for rank, each in enumerate(held):
        bare = own.prefill == 1 and rank % own.tensor
        assert each["weights"] == planned - (biases if bare else 0)
    assert ("adapters" in moved) == ("dp" in layout)  # each domain knows those of its requests
