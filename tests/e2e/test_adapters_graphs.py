"""Adapters in captured decode steps, in the ledger, in what a step may do outside the table."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from harness import ask, start
from lora_files import ATTENTION, EVERY, Recipe, matrices_of, save_pairs
from statics import again, capture_steps, decode, executor_of
from test_ledger_covers_step import LIMIT, Outside

from metainfer.core.errors import ModelError
from metainfer.core.intent import Intent
from metainfer.core.request import SamplingParams
from metainfer.core.step import Segment
from metainfer.engine.engine import Engine
from metainfer.engine.protocol import Guards
from metainfer.executor.protocol import NanGuard
from metainfer.kernels.table import Trace
from metainfer.planner.memory import total

MODEL = "random:tiny-qwen3"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    for name, recipe in {"sql": Recipe(EVERY, rank=6), "law": Recipe(ATTENTION, rank=3)}.items():
        save_pairs(root / name, matrices_of(MODEL), recipe, seed=len(name))
    return {name: str(root / name) for name in ("sql", "law")}


def test_a_bucket_serves_any_mix(folders: dict[str, str], rng: random.Random) -> None:
    """The same buckets one after the other with other adapters, with none, and with padding."""
    engine = start(
        MODEL,
        dtype="float64",
        allow_fallback=("all",),
        ops={"lora": "torch"},  # what a card captures
        context=200,
        concurrency=6,
        adapters=folders,
    )
    mixes = [["sql", "law", ""], ["", "", "law", "sql"], ["", "", ""], ["law"], [""], ["sql", ""]]
    prompts = [[rng.randrange(3, 300) for _ in range(5 + i)] for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=7)

    def answers() -> list[list[int]]:
        return [
            answer.tokens
            for mix in mixes
            for answer in ask(engine, prompts[: len(mix)], params, adapters=mix)
        ]

    eager = answers()
    made, replayed = capture_steps(executor_of(engine), decode(4, 2, 1), again), []
    run = made.run

    def spy(segment: Segment, table: Any, *, eager: bool) -> Any:
        out, tokens = run(segment, table, eager=eager), segment.ranks[0].tokens
        if out is not None:
            assert out.inputs.adapters is not None
            places = out.inputs.adapters.index
            assert (places[tokens:] == -1).all()
            replayed.append(tuple(places[:tokens].tolist()))
        return out

    made.run = spy  # type: ignore[method-assign]
    assert answers() == eager
    assert {(1, 0, -1), (-1, -1, 0, 1), (-1, -1, -1), (0,), (-1,)} <= set(replayed)


def test_the_ledger_holds_what_is_loaded(folders: dict[str, str]) -> None:
    for loaded in ({}, folders):
        engine = start(MODEL, adapters=loaded)
        assert engine.resolved is not None
        ledger = engine.resolved.plan.ledger
        weights = total([row for row in ledger if row.kind == "weights"])
        assert engine.held_bytes["weights"] == weights


def test_no_operation_over_a_megaflop_outside_the_table(folders: dict[str, str]) -> None:
    trace = Trace()
    engine = start(MODEL, trace=trace, chunk_tokens=64, concurrency=2, adapters=folders)
    prompts = [list(range(3, 43)), list(range(60, 100))]
    with Outside(trace) as outside:
        ask(engine, prompts, SamplingParams(max_tokens=5, seed=1), adapters=["sql", "law"])
    assert max(flop for _, flop in outside.found) <= LIMIT
    assert any(site.startswith("lora.") for _, site, _ in trace.calls)


def test_nan_in_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_pairs(tmp_path / "bad", matrices_of(MODEL), Recipe(("q_proj",)), seed=1)
    path = tmp_path / "bad" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "layers.2" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(ModelError, match="holds NaN or infinity") as caught:
        start(MODEL, adapters={"bad": str(tmp_path / "bad")})
    assert name in caught.value.cause and "'bad'" in caught.value.cause


def test_an_adapter_that_breaks_ends_its_own_requests_and_is_named(folders: dict[str, str]) -> None:
    """Numbers of one adapter reach no other row, and the guard names the op that made them."""
    guards = Guards(NanGuard.LAYERS)
    faults: list[Any] = []
    wish = Intent(model=MODEL, threads=1, adapters=folders)
    engine = Engine(wish, guards=guards, on_fault=faults.append)
    engine.start()
    prompts, params = [[5, 6, 7], [8, 9], [10]], SamplingParams(temperature=0.0, max_tokens=4)
    whole = ask(engine, prompts, params, adapters=["sql", "", "law"])
    assert [answer.error for answer in whole] == ["", "", ""]
    broken = executor_of(engine)._parts.model.layers[1].pairs["o"]
    broken.a[1] = 1e38  # finite, as the loader wants it; places are in the order of names
    found = ask(engine, prompts, params, adapters=["sql", "", "law"])
    assert "NaN or infinity" in found[0].error
    assert [answer.tokens for answer in found[1:]] == [answer.tokens for answer in whole[1:]]
    assert any("lora.o" in str(fault) and "layer 1" in str(fault) for fault in faults), faults
