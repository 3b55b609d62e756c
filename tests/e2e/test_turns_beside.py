"""Halves of a chunk in turns, products summed in pieces, and the shared expert beside: no answer
changes, whenever what runs beside is in fact done.

Ranks are stood in for by a peer that adds nothing. What it is given is poisoned until somebody
waits for it, so that whoever reads or writes too early is seen; whether its work is done at the
fork or at the wait is drawn for each call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import v4
from harness import Answer, ask, save_tiny, start
from test_invariance import same
from torch import Tensor

from metainfer.comm.peers import Alone
from metainfer.comm.side import IN_ORDER, Pending
from metainfer.core.request import SamplingParams
from metainfer.engine.engine import Engine

CHUNK, BESIDE = 24, 5
VOCAB = {"llama": 131, "deepseek-v4": 256}


@dataclass
class Later(Pending[Any]):
    work: Callable[[], Any]
    done: Any = None

    def wait(self) -> Any:
        return self.work() if self.done is None else self.done


@dataclass
class Poisoned(Pending[Tensor]):
    peer: Peer
    x: Tensor
    kept: Tensor

    def wait(self) -> Tensor:
        assert bool(self.x.isnan().all()), "written before it was waited for"
        self.peer.open -= 1
        return self.x.copy_(self.kept)


@dataclass
class Peer(Alone):
    """A rank whose peers add nothing; `rows_of` every sum in order. `open`: sums under way;
    `beside`: how many began while another was."""

    size = 2
    rows_of: list[int] = field(default_factory=list)
    open: int = 0
    beside: int = 0

    def start_sum(self, x: Tensor) -> Pending[Tensor]:
        self.rows_of.append(x.shape[0])
        self.beside += self.open > 0
        self.open += 1
        pending = Poisoned(self, x, x.clone())
        x.fill_(float("nan"))
        return pending


@dataclass
class Domains(Alone):
    """A domain whose peers have the same rows, and experts that give this one's back; what is done
    in `order`: its name, and the rows of a half."""

    size = 2
    order: list[tuple[str, int]] = field(default_factory=list)

    def start_rows(self, x: Tensor, numbers: int = 0) -> Pending[Tensor]:
        self.order.append(("gather", x.shape[0]))
        return Later(lambda: torch.cat((x, x)))

    def start_sum_rows(self, x: Tensor) -> Pending[Tensor]:
        self.order.append(("scatter", x.shape[0] // 2))
        return Later(lambda: x[: x.shape[0] // 2])


@dataclass
class AnyTime:
    rng: random.Random
    forks: int = 0

    def fork(self, work: Callable[[], Any]) -> Pending[Any]:
        self.forks += 1
        return Later(work) if self.rng.random() < 0.5 else Later(work, work())

    def run(self, work: Callable[[], Any]) -> Any:
        return work()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    found = {}
    for name in VOCAB:
        folder = tmp_path_factory.mktemp(name)
        if name == "llama":
            save_tiny("llama", folder, 2)
            wishes: dict[str, Any] = {}
        else:
            shape = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
            v4.save(v4.tiny(22, **shape), folder)
            layouts = {"kv": "latent@1", "index": "index@1"}
            wishes = {"layouts": layouts, "shared_beside": BESIDE}
        found[name] = start(
            Path(folder), dtype="float64", context=96, concurrency=4, chunk_tokens=CHUNK,
            **wishes,
        )  # fmt: skip
    yield found
    for engine in found.values():
        engine.close()


@contextmanager
def in_turns(
    engine: Engine, rng: random.Random, least: int = 2, *, pieces: int = 0
) -> Iterator[tuple[Peer, AnyTime]]:
    """Inside, chunks from `least` tokens on take turns by halves, others from `pieces` on sum
    products in pieces, beside a poisoning peer."""
    executor: Any = engine._executor
    parts, model, peer, side = executor._parts, executor._parts.model, Peer(), AnyTime(rng)
    dense = hasattr(model, "peers")
    executor._parts = replace(parts, halves=least, sum_pieces=pieces)
    before = model.peers if dense else model.ranks
    if dense:
        model.peers = peer
    else:
        rows, model.ranks = model.beside_rows, replace(before, tensor=peer)
        model.beside, model.beside_rows = side, 7
    try:
        yield peer, side
    finally:
        executor._parts = parts
        if dense:
            model.peers = before
        else:
            model.ranks, model.beside, model.beside_rows = before, IN_ORDER, rows


@contextmanager
def nothing_beside(engine: Engine) -> Iterator[None]:
    executor: Any = engine._executor
    model = executor._parts.model
    rows = getattr(model, "beside_rows", 0)
    model.beside_rows = 0
    try:
        yield
    finally:
        model.beside_rows = rows


def drawn(rng: random.Random, name: str, count: int) -> tuple[list[list[int]], list[Any]]:
    stem = [rng.randrange(3, VOCAB[name]) for _ in range(32)]
    prompts = [
        stem[: rng.choice((0, 16, 32))]
        + [rng.randrange(3, VOCAB[name]) for _ in range(rng.randrange(1, 30))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            temperature=rng.choice((0.0, 0.9)), seed=rng.randrange(99), logprobs=0,
            max_tokens=rng.randrange(1, 9), prompt_logprobs=rng.choice((None, 0)),
        )
        for _ in prompts
    ]  # fmt: skip
    return prompts, params


@pytest.mark.parametrize("name", VOCAB)
def test_turns_change_no_answer(name: str, engines: dict[str, Engine], rng: random.Random) -> None:
    prompts, params = drawn(rng, name, 8)
    engine = engines[name]
    wanted: list[Answer] = []
    for prompt, each in zip(prompts, params, strict=True):
        with nothing_beside(engine):
            wanted += ask(engine, [prompt], [each], audit=False)
    with in_turns(engine, rng) as (peer, side):
        found = ask(engine, prompts, params, audit=False)
    for answer, expected in zip(found, wanted, strict=True):
        same(answer, expected)
        assert len(answer.prompt_logprobs) == len(expected.prompt_logprobs)
    assert (
        peer.open == 0 and len(peer.rows_of) > 20 and (side.forks > 20) is (name == "deepseek-v4")
    )


@pytest.mark.parametrize("name", VOCAB)
def test_pieces_change_no_answer(name: str, engines: dict[str, Engine], rng: random.Random) -> None:
    """Chunks of one row too, shorter ones than there are pieces, and halves of the longest."""
    prompts, params = drawn(rng, name, 6)
    wanted: list[Answer] = []
    for prompt, each in zip(prompts, params, strict=True):
        with nothing_beside(engines[name]):
            wanted += ask(engines[name], [prompt], [each], audit=False)
    with in_turns(engines[name], rng, CHUNK, pieces=1) as (peer, _):
        found = ask(engines[name], prompts, params, audit=False)
    for answer, expected in zip(found, wanted, strict=True):
        same(answer, expected)
    assert peer.open == 0 and peer.beside > 20


@pytest.mark.parametrize("name", VOCAB)
def test_each_product_of_a_chunk_computes_beside_its_own_sums(
    name: str, engines: dict[str, Engine], rng: random.Random
) -> None:
    """Its last piece waits alone. Shorter chunks than asked for stay whole, and decodes."""
    engine, params = engines[name], SamplingParams(temperature=0.0, max_tokens=3)
    with in_turns(engine, rng, 0, pieces=10) as (peer, _):
        ask(engine, [[5] * 23], [params])
    sums = len(peer.rows_of) // 4  # as many as of a decode, of which there are two
    assert peer.rows_of == [12, 11] * sums + [1] * (2 * sums) and peer.beside == sums
    with in_turns(engine, rng, 0, pieces=10) as (peer, _):
        ask(engine, [[5] * 9], [params])
    assert peer.rows_of == [9] * sums + [1] * (2 * sums) and peer.beside == 0


@pytest.mark.parametrize("name", VOCAB)
def test_sums_alternate_by_halves_in_an_order_that_the_number_of_rows_gives(
    name: str, engines: dict[str, Engine], rng: random.Random
) -> None:
    """So ranks whose requests differ issue the same collectives in the same order."""
    orders = []
    for prompts in ([11, 12], [20, 3]):  # 23 rows in one step
        tokens = [[rng.randrange(3, VOCAB[name]) for _ in range(count)] for count in prompts]
        with in_turns(engines[name], rng) as (peer, _):
            ask(engines[name], tokens, [SamplingParams(temperature=0.0, max_tokens=1)] * 2)
        orders.append(peer.rows_of)
        # One half computes while the other's sum is under way, and starts its own.
        assert peer.beside == len(peer.rows_of) - 1
    assert orders[0] == orders[1] == [12, 11] * (len(orders[0]) // 2) and len(orders[0]) == 12


def test_rows_of_a_half_are_on_their_way_beside_the_attention_of_the_other(
    engines: dict[str, Engine], rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where domains meet at the experts alone, nobody is waited for between attention and them; and
    what comes back is on its way beside the other half's experts, then its own next attention."""
    executor: Any = engines["deepseek-v4"]._executor
    model, meet = executor._parts.model, Domains()
    attention = model._attention

    def told(x: Tensor, *more: Any) -> Any:
        meet.order.append(("attention", x.shape[0]))
        return attention(x, *more)

    monkeypatch.setattr(model, "_attention", told)
    monkeypatch.setattr(model, "ranks", replace(model.ranks, domains=meet, expert=meet))
    monkeypatch.setattr(executor, "_parts", replace(executor._parts, halves=23))
    ask(engines["deepseek-v4"], [[7] * 23], [SamplingParams(temperature=0.0, max_tokens=1)])
    layer = [
        (name, rows)
        for rows in (12, 11)
        for name in ("attention", "gather")
    ] + [("scatter", 12), ("scatter", 11)]  # fmt: skip
    assert meet.order == layer * model.arch.layers


def test_shorter_chunks_and_decodes_take_no_turns(
    engines: dict[str, Engine], rng: random.Random
) -> None:
    with in_turns(engines["llama"], rng, least=20) as (peer, _):
        ask(engines["llama"], [[5] * 19], [SamplingParams(temperature=0.0, max_tokens=3)])
    assert set(peer.rows_of) == {19, 1} and peer.beside == 0


def test_the_plan_s_bound_is_the_model_s(engines: dict[str, Engine], rng: random.Random) -> None:
    engine, forks = engines["deepseek-v4"], []
    executor: Any = engine._executor
    model = executor._parts.model
    for rows in (BESIDE, BESIDE + 1):
        model.beside = side = AnyTime(rng)
        ask(engine, [[7] * rows], [SamplingParams(temperature=0.0, max_tokens=1)])
        model.beside = IN_ORDER
        forks.append(side.forks)
    assert forks == [3, 0]  # a layer each
