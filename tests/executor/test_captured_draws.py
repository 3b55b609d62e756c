"""Draws behind a captured step: the tokens that drawing op by op gives, replay after replay."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from statics import record

from metainfer.core.request import SamplingParams
from metainfer.executor.drawing import CapturedDraws, DrawBuffers, StepDraws, narrows
from metainfer.executor.sampler import _of_step, _Row, gather
from metainfer.executor.slots import SlotState
from metainfer.ops.sample import ref
from metainfer.ops.sample.inputs import SampleInputs

ROWS, VOCAB = 6, 50
CPU = torch.device("cpu")


def row(number: int, drawn: int = 0, **params: Any) -> _Row:
    given = SamplingParams(**params)
    state = SlotState(f"r{number}", given, 2, [1, 2, *range(drawn)], drawn, (), VOCAB)
    return _Row(state, ())


def drawn_rows(source: random.Random, count: int, *, narrow: bool) -> list[_Row]:
    """Rows of every temperature; a filter is on in some of them, if in any."""

    def pick(off: float, *on: float) -> float:
        return source.choice((off, *on)) if narrow else off

    return [
        row(
            number,
            source.randrange(4),
            temperature=source.choice((0.0, 0.7, 1.5)),
            top_k=int(pick(0, 1, 5)),
            top_p=pick(1.0, 0.3, 0.9),
            min_p=pick(0.0, 0.2),
            seed=source.getrandbits(62),
        )
        for number in range(count)
    ]  # fmt: skip


def wanted(rows: list[_Row]) -> list[tuple[SamplingParams, int]]:
    return [(each.state.params, each.index) for each in rows]


def test_replays_draw_what_each_row_draws_alone() -> None:
    """Other logits and other rows each time, fewer than the step has, in both forms by turns."""
    source, generator = random.Random(3), torch.Generator().manual_seed(3)
    logits = torch.zeros(ROWS, VOCAB, dtype=torch.float64)
    draws = CapturedDraws(logits, ref.sample, record)
    met = Counter[bool]()
    for turn in range(24):
        logits.copy_(torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64))
        rows = drawn_rows(source, 1 + turn % ROWS, narrow=bool(turn % 2))
        if turn == 9:
            logits[0] = float("nan")
        found = draws(wanted(rows))
        met[any(narrows(each.state.params) for each in rows)] += 1
        assert len(found.tokens) == len(found.bad) == len(rows)
        for number, each in enumerate(rows):
            alone = ref.sample(logits[number : number + 1], gather([each], CPU))
            assert bool(found.bad[number]) == bool(alone.bad[0])
            assert bool(found.bad[number]) or int(found.tokens[number]) == int(alone.tokens[0])
    assert min(met.values()) > 5


def test_the_host_writes_what_it_would_gather() -> None:
    """Number for number, of 63 bits and of fractions; rows behind the last are greedy and free."""
    buffers = DrawBuffers.make(ROWS, CPU)
    for count in (ROWS, 3, 1):
        rows = drawn_rows(random.Random(count), count, narrow=True)
        rows[0].state.params = SamplingParams(temperature=0.3, top_p=0.7, seed=2**63 - 1)
        buffers.fill(wanted(rows))
        mine, theirs = buffers.inputs(narrowed=True), gather(rows, CPU)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "index"):
            given, other = getattr(mine, name), getattr(theirs, name)
            assert given.dtype == other.dtype and torch.equal(given[:count], other), name
        assert mine.temperature is not None and not mine.temperature[count:].any()
        assert mine.top_p is not None and bool((mine.top_p[count:] == 1).all())
    plain = buffers.inputs(narrowed=False)
    assert plain.top_k is plain.top_p is plain.min_p is None


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_b30_what_narrows_comes_whole_or_not_at_all(name: str) -> None:
    """Each set of filters would be a kernel of its own, compiled when a request first asks."""
    value: Any = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}[name]
    inputs = gather([row(0, temperature=1.0, seed=1, **{name: value})], CPU)
    assert None not in (inputs.top_k, inputs.top_p, inputs.min_p)
    free = gather([row(0, temperature=1.0, seed=1)], CPU)
    assert free.top_k is free.top_p is free.min_p is None


def step(count: int) -> StepDraws:
    logits = torch.zeros(count, VOCAB, dtype=torch.float64)
    best = ref.sample(logits, SampleInputs(greedy=True))
    return StepDraws(best, CapturedDraws(logits, ref.sample, record), Counter())


@pytest.mark.parametrize(
    ("how", "params"),
    [
        ("likeliest", {"temperature": 0.0}),
        ("captured", {"temperature": 1.0, "top_p": 0.5}),
        ("history", {"temperature": 1.0, "presence_penalty": 0.5}),
        ("history", {"bad_words": ((3,),)}),
        ("bias", {"temperature": 1.0, "logit_bias": {3: 1.0}}),
        ("mask", {"allowed_token_ids": (3, 4)}),
        ("logprobs", {"logprobs": 0}),
        ("min_tokens", {"min_tokens": 2}),
    ],
)
def test_what_a_captured_draw_does_not_know_is_refused_by_name(
    how: str, params: dict[str, Any]
) -> None:
    """Beside a row that it knows, too."""
    given, known = {"temperature": 0.5, "seed": 1, **params}, row(1, temperature=1.0, seed=2)
    for rows in ([row(0, **given)], [known, row(0, **given)]):
        mine = step(len(rows))
        found = _of_step(mine, rows)
        told = "captured" if how == "likeliest" and len(rows) > 1 else how
        assert mine.counts == {told: 1}
        assert (found is None) == (told not in ("likeliest", "captured"))
    uneven = step(3)
    assert _of_step(uneven, [known]) is None and uneven.counts == {"uneven": 1}
    past = step(1)
    enough = row(0, drawn=2, temperature=1.0, seed=1, min_tokens=2)
    assert _of_step(past, [enough]) is not None and past.counts == {"captured": 1}
