"""B-19: the indexer's scores are sliced by rows; slices change nothing and bound the workspace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from metainfer.executor.peaks import peaks
from metainfer.kv.book.form import index_plain
from metainfer.kv.store.entries import EntryPages
from metainfer.ops.indexer import torch_select

HEADS, WIDTH, RATIO, TOP_K, PAGE = 4, 16, 4, 8, 16


def select(rows: int, context: int, seed: int) -> Callable[[], Tensor]:
    """`index_select` for the last `rows` tokens of one sequence; whole numbers, so that sums are
    exact in any order."""
    make = torch.Generator().manual_seed(seed)
    entries = context // RATIO
    pages = -(-entries // PAGE) + 1

    def whole(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=make).float()

    held = EntryPages(0, whole(pages, PAGE, WIDTH), index_plain(WIDTH, "float32"), PAGE)
    q, g = whole(rows, HEADS, WIDTH), whole(rows, HEADS)
    table = torch.arange(1, pages, dtype=torch.int32).unsqueeze(0)
    positions = torch.arange(context - rows, context)
    start = torch.tensor([0, rows], dtype=torch.int32)
    lens = torch.tensor([context], dtype=torch.int32)

    def call() -> Tensor:
        return torch_select.index_select(
            q, g, held, table, positions, start, lens, ratio=RATIO, top_k=TOP_K, scale=0.5
        )

    return call


@pytest.mark.parametrize(("rows", "context"), [(33, 96), (97, 403), (1, 1024)])
def test_b19_every_row_is_covered_once_whatever_the_slice(
    rows: int, context: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = select(rows, context, seed)
    whole = call()
    scored: list[int] = []
    scores = torch_select._scores

    def counted(q: Tensor, *rest: object) -> Tensor:
        scored.append(q.shape[0])
        return scores(q, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_select, "_scores", counted)
    for rows_of_a_slice in (1, 13, 64, 10_000):
        scored.clear()
        block = rows_of_a_slice * HEADS * (context // RATIO)
        monkeypatch.setattr(torch_select, "BLOCK", block)
        assert torch.equal(call(), whole)
        assert sum(scored) == rows and max(scored) <= rows_of_a_slice


def test_b19_the_workspace_follows_the_slice_and_not_the_rows(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the rows of a slice of fixed size need the keys and the choice, never the scores."""
    block = 1 << 14
    monkeypatch.setattr(torch_select, "BLOCK", block)
    context = 2048
    calls = {rows: select(rows, context, seed) for rows in (64, 128, 256)}
    found = dict(zip(calls, peaks(torch.device("cpu"), _quiet(calls.values())), strict=True))
    keys = (context // RATIO) * WIDTH * 4
    for rows, most in found.items():
        out = rows * TOP_K * 4
        # Products of a slice and what a threshold makes of its scores; keys gathered twice.
        assert most <= 4 * (2 * block) + 4 * keys + 16 * out
        unsliced = rows * HEADS * (context // RATIO) * 4
        assert rows == 64 or most < unsliced / 2
    assert found[256] < 1.5 * found[64]


def _quiet(calls: object) -> list[Callable[[], None]]:
    """The calls, their results dropped."""

    def dropping(call: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            call()

        return run

    return [dropping(call) for call in calls]  # type: ignore[attr-defined]
