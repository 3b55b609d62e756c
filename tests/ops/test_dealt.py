"""A cache dealt over ranks gives what it gives whole: attention, the choice, dense heads.

Ranks are played in turn; what they would send each other is laid side by side. Float64.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metainfer.comm.peers import ALONE
from metainfer.kv.book.form import index_plain, latent_plain
from metainfer.kv.store.entries import EntryPages, store
from metainfer.models.common.dealt import Dealt
from metainfer.ops.attn_paged import ref as paged_ref
from metainfer.ops.attn_sparse import ref as sparse_ref
from metainfer.ops.dealt import ref, torch_dealt
from metainfer.ops.indexer import ref as indexer_ref
from metainfer.ops.rope.tables import RopeSpec, cos_sin

RATIO, PAGE, WIDTH, TURNED, WINDOW = 4, 8, 16, 8, 5
MODULES = pytest.mark.parametrize("module", [ref, torch_dealt], ids=["ref", "torch"])


class Rank(Dealt):
    """Only its place among `ranks`."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(ALONE)
        self.rank, self.size = rank, ranks


def noise(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def dealt(
    values: Tensor, ranks: int, table: Tensor, form: Callable[[int], EntryPages]
) -> list[EntryPages]:
    """`values` [n, D] of one sequence whose pages are `table`, entry by entry over `ranks`."""
    size, found = PAGE // ranks, []
    for rank in range(ranks):
        own = values[rank::ranks]
        pages, at = form(size), torch.arange(len(own))
        store(pages, table[at // size].long() * size + at % size, own)
        found.append(pages)
    return found


def latents(entries: int) -> EntryPages:
    return EntryPages(0, torch.full((9, entries, WIDTH), torch.nan, dtype=torch.float64),
                      latent_plain(WIDTH, TURNED, "float64"), entries)  # fmt: skip


def keys(entries: int) -> EntryPages:
    return EntryPages(0, torch.full((9, entries, WIDTH), torch.nan, dtype=torch.float64),
                      index_plain(WIDTH, "float64"), entries)  # fmt: skip


contexts = st.lists(st.integers(1, 130), min_size=1, max_size=3)
settled = settings(max_examples=6, deadline=None)


@MODULES
@settled
@given(contexts, st.sampled_from((2, 4, 8)), st.integers(0, 99), st.integers(1, 6))
def test_parts_with_their_logarithms_are_the_whole(
    module: ModuleType, spans: list[int], ranks: int, seed: int, top_k: int
) -> None:
    g, heads, rows = torch.Generator().manual_seed(seed), 2, len(spans)
    positions = torch.tensor(spans) - 1
    q, sinks = noise(g, rows, ranks * heads, WIDTH), noise(g, ranks * heads).float()
    turn = cos_sin(RopeSpec(rotated=TURNED), 200)
    table = torch.stack([torch.randperm(8, generator=g)[:5] + 1 for _ in spans]).int()
    selected = torch.full((rows, top_k), -1, dtype=torch.int32)
    own = torch.full((ranks, rows, top_k), -1, dtype=torch.int32)
    whole, parts = [], []
    for row, span in enumerate(spans):
        values = noise(g, span // RATIO, WIDTH)
        chosen = torch.randperm(len(values), generator=g)[:top_k].sort().values
        selected[row, : len(chosen)] = chosen.int()
        for rank in range(ranks):
            mine = chosen[chosen % ranks == rank] // ranks
            own[rank, row, : len(mine)] = mine.int()
        whole += dealt(values, 1, table[row], latents)
        parts.append(dealt(values, ranks, table[row], latents))
    near = EntryPages(0, noise(g, 17, PAGE, WIDTH), latents(PAGE).form, PAGE)
    near_table = torch.arange(17).repeat(rows, 1).int()
    listed = (positions.unsqueeze(1) - torch.arange(WINDOW)).int()
    scale, first = WIDTH**-0.5, slice(0, heads)
    for row in range(rows):  # a call each, since pages of rows overlap
        one, this = torch.tensor([0, 1]).int(), slice(row, row + 1)
        want = sparse_ref.attn_sparse(
            q[this], near, near_table[this], whole[row], table[this], selected[this], sinks, turn,
            positions[this], one, positions[this].int() + 1, scale=scale, window=WINDOW,
            ratio=RATIO,
        )  # fmt: skip
        beside = [
            module.attn_part(q[this, r * heads : (r + 1) * heads], near, near_table[this],
                             listed[this], sinks[r * heads : (r + 1) * heads], one, scale=scale)
            for r in range(ranks)
        ]  # fmt: skip
        far = [
            module.attn_part(
                q[this], parts[row][r], table[this], own[r, this], None, one, scale=scale
            )
            for r in range(ranks)
        ]
        logs = torch.stack([
            torch.cat((log, near_log), dim=1)
            for (_, log), (_, near_log) in zip(far, beside, strict=True)
        ])  # fmt: skip
        total = sum(
            module.attn_weigh(q[this, first], far[r][0].clone(), logs, beside[r][0], turn,
                              positions[this], rank=r)
            for r in range(ranks)
        )  # fmt: skip
        torch.testing.assert_close(total.flatten(0, 1).view(1, -1, WIDTH), want, rtol=0, atol=1e-12)


@MODULES
@settled
@given(contexts, st.sampled_from((2, 4)), st.integers(0, 99), st.integers(1, 9))
def test_the_best_of_the_parts_are_the_best_of_all(
    module: ModuleType, spans: list[int], ranks: int, seed: int, top_k: int
) -> None:
    """Whole numbers, so that equal scores are many and exact: the very same entries, ties too."""
    g, heads = torch.Generator().manual_seed(seed), 3
    for span in spans:
        visible, one = span // RATIO, torch.tensor([0, 1]).int()
        table = (torch.randperm(8, generator=g)[:5] + 1).int().unsqueeze(0)
        values = torch.randint(-1, 2, (visible, WIDTH), generator=g).double()
        q = torch.randint(-1, 2, (1, heads, WIDTH), generator=g).double()
        weights = torch.randint(-1, 2, (1, heads), generator=g).double()
        (whole,) = dealt(values, 1, table[0], keys)
        want = indexer_ref.index_select(
            q, weights, whole, table, torch.tensor([span - 1]), one,
            torch.tensor([span]).int(), ratio=RATIO, top_k=top_k, scale=0.25,
        )  # fmt: skip
        offered = [
            module.index_part(q, weights, part, table, Rank(r, ranks).held(torch.tensor([visible])),
                              one, top_k=top_k, scale=0.25)
            for r, part in enumerate(dealt(values, ranks, table[0], keys))
        ]  # fmt: skip
        found, scores = (torch.stack(each) for each in zip(*offered, strict=True))
        chosen = [
            number * ranks + r
            for r in range(ranks)
            for number in module.index_merge(found, scores, rank=r)[0].tolist()
            if number >= 0
        ]
        assert sorted(chosen) == [n for n in want[0].tolist() if n >= 0]


@MODULES
@settled
@given(contexts, st.sampled_from((2, 4)), st.integers(0, 99))
def test_dense_keys_in_parts_are_the_whole(
    module: ModuleType, spans: list[int], ranks: int, seed: int
) -> None:
    g, heads, hkv = torch.Generator().manual_seed(seed), 3, 1
    for span in spans:
        one, count = torch.tensor([0, 1]).int(), torch.tensor([span])
        kv = noise(g, 2, 17 * PAGE, hkv, WIDTH)  # in order: page w is page w
        table = torch.arange(17).int().unsqueeze(0)
        q = noise(g, 1, ranks * heads, WIDTH)
        cache = kv.view(2, 17, PAGE, hkv, WIDTH)
        want = paged_ref.attn_paged(q, cache[0], cache[1], table, one, count.int(), scale=0.25)
        found = [
            module.attn_paged_part(
                q, *kv[:, r::ranks].reshape(2, 17, PAGE // ranks, hkv, WIDTH), table,
                Rank(r, ranks).held(count), one, scale=0.25,
            )
            for r in range(ranks)
        ]  # fmt: skip
        logs = torch.stack([log for _, log in found])
        total = sum(
            module.attn_weigh(q[:, :heads], mix.clone(), logs, None, None, count, rank=r)
            for r, (mix, _) in enumerate(found)
        )
        torch.testing.assert_close(total.flatten(0, 1).view(1, -1, WIDTH), want, rtol=0, atol=1e-12)


@MODULES
def test_rows_of_padding_alone_find_nothing(module: ModuleType) -> None:
    """A domain without requests computes as many rows as the widest, and has no page table."""
    table = torch.zeros(0, 4, dtype=torch.int32)
    start = torch.zeros(1, dtype=torch.int32)
    rows = torch.ones(3, 2, WIDTH, dtype=torch.float64)
    pages = latents(PAGE)
    listed = torch.full((3, 5), -1, dtype=torch.int32)
    mixed, logs = module.attn_part(rows, pages, table, listed, None, start, scale=1.0)
    assert not mixed.any() and (logs <= -1e29).all()
    counts = torch.zeros(3, dtype=torch.int64)
    weights = torch.ones(3, 2, dtype=torch.float64)
    found, values = module.index_part(
        rows, weights, keys(PAGE), table, counts, start, top_k=6, scale=1.0
    )
    assert (found == -1).all() and not values.any()
    cache = torch.full((9, PAGE, 1, WIDTH), torch.nan, dtype=torch.float64)
    mixed, logs = module.attn_paged_part(rows, cache, cache, table, counts, start, scale=1.0)
    assert not mixed.any() and (logs <= -1e29).all()
