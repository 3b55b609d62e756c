"""Corners of DeepSeek-V4 at which something once broke, through the engine."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import v4
from harness import ask, start
from speculation import play
from speculation import same as as_far
from test_invariance import same

from metainfer.core.errors import RequestError
from metainfer.core.request import SamplingParams
from metainfer.core.step import StepPlan
from metainfer.engine.engine import Engine
from metainfer.kv.store.pools import RowPool

PLAIN = {"kv": "latent@1", "index": "index@1"}
FIXED: Mapping[str, Any] = {"dtype": "float64", "layouts": PLAIN}


def test_a_draft_layer_beside_layers_of_other_kinds(tmp_path: Path) -> None:
    """No layer of the model has a window alone or routes by scores; the draft's does both."""
    only = {"num_hidden_layers": 2, "compress_ratios": [4, 128], "num_hash_layers": 2}
    v4.save_with_mtp(v4.tiny(3, **only), tmp_path, seed=5)
    params = SamplingParams(temperature=0.0, max_tokens=9)
    prompt = [[(i * 37) % 256 for i in range(21)]]
    wish = {"context": 64, "concurrency": 1, "chunk_tokens": 32, **FIXED}
    (plain,) = ask(start(tmp_path, **wish), prompt, params)
    (drafted,) = ask(start(tmp_path, draft="mtp:2", **wish), prompt, params)
    assert drafted.tokens == plain.tokens


def test_a_draft_stops_where_the_context_ends(tmp_path: Path) -> None:
    """Of two sequences one wants seven guesses, the other has room for fewer."""
    one = {"num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0}
    v4.save_with_mtp(v4.tiny(3, **one), tmp_path, seed=5)
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (34, 3)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, logprobs=0) for n in (14, 30)]
    wish = {"context": 48, "chunk_tokens": 64, **FIXED, "layouts": {"kv": "latent@1"}}
    drafting = start(tmp_path, concurrency=2, draft="mtp:7", **wish)
    alone = start(tmp_path, concurrency=1, prefix_cache=False, **wish)
    for answer, prompt, wanted in zip(ask(drafting, prompts, params), prompts, params, strict=True):
        same(answer, ask(alone, [prompt], wanted)[0])
    with pytest.raises(AssertionError):  # the comparison can fail
        same(*ask(alone, prompts, params))


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """Experts of the first layers are looked up by token id; the last id is a token like others."""
    v4.save(v4.tiny(4, num_hidden_layers=1, compress_ratios=[0], num_hash_layers=1), tmp_path)
    engine = start(tmp_path, context=32, concurrency=1, dtype="float64")
    params = SamplingParams(temperature=0.0, max_tokens=2)
    for token in (-1, 256):
        with pytest.raises(RequestError, match=f"{token} is out of range"):
            ask(engine, [[3, token, 5]], params)
    assert len(ask(engine, [[0, 255]], params)[0].tokens) == 2


def test_nothing_of_a_slot_or_page_outlives_its_owner(tmp_path: Path) -> None:
    """States of freed slots, free pages and free snapshot places hold NaN; answers do not."""
    layers = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
    v4.save(v4.tiny(21, **layers), tmp_path)
    wish = {"context": 96, "chunk_tokens": 24, **FIXED}
    engine = start(tmp_path, concurrency=3, page_tokens=16, **wish)
    alone = start(tmp_path, concurrency=1, prefix_cache=False, **wish)
    executor = engine._executor
    assert executor is not None
    submit = executor.submit

    def poisoned(plan: StepPlan) -> None:
        _poison(engine, plan.released)
        submit(plan)

    executor.submit = poisoned  # type: ignore[method-assign]
    rng = random.Random(6)
    stem = [rng.randrange(256) for _ in range(64)]
    hits = 0
    for turn in range(4):
        prompts = [
            [*stem[: rng.choice((0, 16, 31, 48, 64))], *(rng.randrange(256) for _ in range(n))]
            for n in (1, 7, 18, 30)
        ]
        params = [SamplingParams(temperature=0.0, max_tokens=n, logprobs=0) for n in (1, 2, 9, 2)]
        answers = play(engine, prompts, params, late=bool(turn % 2), cancel={2: 2 + turn})
        for answer, prompt, wanted in zip(answers, prompts, params, strict=True):
            as_far(answer, ask(alone, [prompt], wanted, audit=False)[0])
            hits += answer.cached_tokens > 0
    assert hits > 4


def _poison(engine: Engine, slots: tuple[int, ...]) -> None:
    executor = engine._executor
    assert executor is not None
    store, (domain,) = executor._parts.store, engine.scheduler.domains
    for pool in store.pools:
        if isinstance(pool, RowPool):
            pool.data[:, list(slots)] = float("nan")
    for group, pages in zip(domain.kv.paged, domain.kv.pools, strict=True):
        unowned = [0, *pages.free]
        store.pools[group.index].data[:, unowned] = float("nan")  # type: ignore[attr-defined]
    for number, places in domain.kv.snapshots.items():
        store.pools[number].saved[:, places.free] = float("nan")  # type: ignore[attr-defined]
