"""Neighbours with other adapters, chunks, preemption, drafts and prefix hits change no token.

Float64. Each request's reference runs alone, in an engine that has loaded its adapter and no other
(or none), without a prefix cache: 104 random schedules that mix them must say the same.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from harness import Answer, ask, save_tiny, start
from lora_files import ATTENTION, EVERY, Recipe, save_adapter
from msgspec.structs import replace
from test_invariance import requests, same

from metainfer.core.request import SamplingParams
from metainfer.engine.engine import Engine

SCHEDULES = 104
PER_ENGINE = 13
LONGEST = 26
RECIPES = {
    "sql": Recipe(EVERY, rank=6, alpha=9, rslora=True),
    "law": Recipe(ATTENTION, rank=3, alpha=4, ranks={"q_proj": 5}),
}


class World:
    """A base model with two adapters on disk, and one engine alone for each."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "base"
        model = save_tiny("llama", self.base, seed=0)
        for seed, (name, recipe) in enumerate(RECIPES.items()):
            save_adapter(folder / name, model, recipe, seed)
        self.folders = {name: str(folder / name) for name in RECIPES}
        self.alone = {name: self._alone(name) for name in ("", *RECIPES)}

    def _alone(self, name: str) -> Engine:
        loaded = {name: self.folders[name]} if name else {}
        wishes = {"context": 128, "concurrency": 1, "prefix_cache": False}
        return start(self.base, dtype="float64", adapters=loaded, **wishes)

    def expected(self, prompt: list[int], params: SamplingParams, adapter: str) -> Answer:
        return ask(self.alone[adapter], [prompt], params, adapters=[adapter], audit=False)[0]

    def together(self, rng: random.Random, number: int) -> Engine:
        """Page, chunk and batch drawn; each other engine drafts, most pools are too small."""
        running = rng.randrange(4, 7)
        bytes_per_token = 3 * 2 * 2 * 8 * 8  # layers, K and V, KV heads, head width, float64
        return start(
            self.base,
            dtype="float64",
            context=128,
            page_tokens=rng.choice((4, 8, 16)),
            concurrency=running,
            chunk_tokens=max(running, rng.choice((5, 16, 33, 128))),
            kv_bytes=(19, 19, 22, 400)[number % 4] * 8 * bytes_per_token,
            prefix_cache=number % 4 != 1,
            draft="ngram:3" if number % 2 else None,
            adapters=self.folders,
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("adapters"))


@pytest.mark.timeout(600)
def test_schedules_change_no_token(world: World, rng: random.Random) -> None:
    preemptions = hits = drafted = 0
    for number in range(SCHEDULES // PER_ENGINE):
        engine = world.together(rng, number)
        for _ in range(PER_ENGINE):
            prompts, params = requests(rng)
            params = [replace(each, max_tokens=1 + each.max_tokens % LONGEST) for each in params]
            adapters = [rng.choice(("", *RECIPES)) for _ in prompts]
            answers = ask(engine, prompts, params, adapters=adapters)
            for answer, *asked in zip(answers, prompts, params, adapters, strict=True):
                same(answer, world.expected(*asked))
                hits += answer.cached_tokens > 0
        preemptions += engine.stats().preemptions
        drafted += engine.stats().drafted_tokens
    # The schedules must have exercised what they are about.
    assert hits > 3 and preemptions > 3 and drafted > 0, (hits, preemptions, drafted)


def test_b27_the_same_prompt_under_each_adapter(world: World, rng: random.Random) -> None:
    """One after the other, so that every page of the others lies ready to be taken by mistake."""
    engine = start(world.base, dtype="float64", context=128, page_tokens=8, adapters=world.folders)
    prompt = [rng.randrange(3, 131) for _ in range(60)]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
    names = ["", "sql", "law"]
    expected = {name: world.expected(prompt, params, name) for name in names}
    assert len({tuple(answer.tokens) for answer in expected.values()}) == 3
    for cached in (0, 56):
        for name in names:
            (answer,) = ask(engine, [prompt], params, adapters=[name])
            same(answer, expected[name])
            assert answer.cached_tokens == cached
