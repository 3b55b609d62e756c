"""The indexer against `transformers`, against matrices and sorts in plain Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from deepseek_oracle import TIGHT, config, filled, lifted, noise, table, theirs
from entry_caches import Candidate, double_key, line, where
from entry_caches import filled as paged
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metainfer.kv.book.form import EntryForm, index_fp4, index_fp8
from metainfer.kv.store.entry_codecs import rounded
from metainfer.ops.common import hadamard, rotate_tail
from metainfer.ops.indexer import ref, torch_select
from metainfer.ops.indexer.ref import scores

index_query, index_select = Candidate(ref.index_query), Candidate(ref.index_select)


@pytest.fixture(
    params=[(ref, 0), (torch_select, 1 << 22), (torch_select, 1)],
    ids=["ref", "torch", "torch-row-by-row"], autouse=True, scope="module",
)  # fmt: skip
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    module, block = request.param
    index_query.op, index_select.op = module.index_query, module.index_select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_select, "BLOCK", block)
        yield


def call(
    q: Tensor, g: Tensor, keys: Tensor, first: int, *, ratio: int, top_k: int, scale: float = 1.0
) -> Tensor:
    """One sequence whose first query stands at `first`."""
    rows = q.shape[0]
    pages, table_ = paged([keys], 3, double_key(keys.shape[1]), seed=rows)
    return index_select(
        q, g, pages, table_, torch.arange(first, first + rows), *where([rows], [first + rows]),
        ratio=ratio, top_k=top_k, scale=scale,
    )  # fmt: skip


@pytest.mark.parametrize("d", [1, 2, 16, 128])
def test_hadamard_is_sylvester_s_matrix(d: int, seed: int) -> None:
    signs = [[(-1.0) ** bin(i & j).count("1") for j in range(d)] for i in range(d)]
    matrix = torch.tensor(signs, dtype=torch.float64)
    x = noise(seed, 3, d)
    torch.testing.assert_close(hadamard(x), x @ matrix * d**-0.5, **TIGHT)
    torch.testing.assert_close(hadamard(hadamard(x)), x, **TIGHT)  # orthonormal, symmetric


def test_rope_turns_the_tail_before_the_product(seed: int) -> None:
    x, positions = noise(seed, 3, 2, 16), torch.tensor([0, 7, 30])
    angle = noise(seed + 1, 40, 4)
    turn = torch.cat((angle.cos(), angle.sin()), -1)
    want = x.clone()
    for t, p in enumerate(positions.tolist()):
        for i in range(4):
            a, b = x[t, :, 8 + 2 * i], x[t, :, 9 + 2 * i]
            want[t, :, 8 + 2 * i] = a * angle[p, i].cos() - b * angle[p, i].sin()
            want[t, :, 9 + 2 * i] = a * angle[p, i].sin() + b * angle[p, i].cos()
    got = index_query(x, positions, turn, double_key(16))
    torch.testing.assert_close(got, want, **TIGHT)


@pytest.mark.parametrize("form", [index_fp4(16), index_fp8(16)], ids=lambda form: form.layout)
def test_queries_are_mixed_and_rounded_as_keys(form: EntryForm, seed: int) -> None:
    x, still = noise(seed, 3, 2, 16), torch.cat((torch.ones(9, 4), torch.zeros(9, 4)), -1)
    got = index_query(x, torch.tensor([0, 3, 8]), still, form)
    mixed = hadamard(x)
    assert torch.equal(got, rounded(form, mixed)) and not torch.equal(got, mixed)
    pages, table_ = paged([mixed[:, 0]], 2, form)
    assert torch.equal(line(pages, table_[0], 3).double(), got[:, 0])


@settings(max_examples=80)
@given(st.data())
def test_selection_by_sorting_in_python(data: st.DataObject) -> None:
    """Scores from a small set: ties, negative weights, rows shorter than k, any chunk."""
    ratio = data.draw(st.sampled_from([1, 3, 4]))
    rows, first = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 20))
    top_k, heads = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 9999)))
    total = (first + rows) // ratio
    q = torch.randint(-1, 2, (rows, heads, 2), generator=g).double()
    weights = torch.randint(-2, 3, (rows, heads), generator=g).double()
    keys = torch.full((total + 2, 2), float("nan"), dtype=torch.float64)
    keys[:total] = torch.randint(-1, 2, (total, 2), generator=g).double()
    got = call(q, weights, keys, first, ratio=ratio, top_k=top_k)
    for j in range(rows):
        value = [
            sum(float(weights[j, h]) * max(0.0, float(q[j, h] @ keys[w])) for h in range(heads))
            for w in range((first + j + 1) // ratio)
        ]
        best = sorted(sorted(range(len(value)), key=lambda w: (-value[w], w))[:top_k])
        assert got[j].tolist() == best + [-1] * (top_k - len(best))


def test_a_query_chooses_alike_in_any_chunk_and_row_length(seed: int) -> None:
    """Ties at 0 must not depend on how many keys exist (field case: torch.topk does)."""
    q, weights = noise(seed, 60, 2, 8), noise(seed + 1, 60, 2)
    keys = noise(seed + 2, 15, 8)
    q[::3] = 0
    whole = call(q, weights, keys, 0, ratio=4, top_k=5)
    assert torch.equal(whole[57], torch.arange(5).int())
    for t in range(60):
        alone = call(q[t : t + 1], weights[t : t + 1], keys, t, ratio=4, top_k=5)
        assert torch.equal(alone[0], whole[t])


def test_unrounded_hadamard_changes_no_score(seed: int) -> None:
    q, g, keys = noise(seed, 5, 3, 32), noise(seed + 1, 5, 3), noise(seed + 2, 9, 32)
    mixed = scores(hadamard(q), g, hadamard(keys), 0.5)
    torch.testing.assert_close(mixed, scores(q, g, keys, 0.5), **TIGHT)


def test_is_transformers_indexer(seed: int) -> None:
    """Scores in float64; sets where they are distinct. It has no Hadamard and no e2m1."""
    settings_ = config()
    x, qr, positions = noise(seed, 75, 64), noise(seed + 1, 75, 32), torch.arange(75)
    caught: list[tuple[Tensor, ...]] = []
    with lifted(), torch.no_grad():
        module = filled(theirs.DeepseekV4Indexer(settings_), seed)
        module.scorer.register_forward_hook(lambda _, args, out: caught.append((*args, out)))
        want = module(x[None], qr[None], positions[None], None, 0)[0]
        turn = table(module.rotary_emb, "compress", 80)
        raw = module.q_b_proj(qr).view(75, 16, 16)
        g = module.scorer.weights_proj(x)
    q, keys, _, value = caught[0]
    mine = rotate_tail(raw, turn[positions].unsqueeze(1))
    torch.testing.assert_close(mine, q[0], **TIGHT)
    torch.testing.assert_close(scores(mine, g, keys[0], 16**-0.5 * 16**-0.5), value[0], **TIGHT)
    got = call(
        index_query(raw, positions, turn, double_key(16)), g, keys[0], 0,
        ratio=4, top_k=4, scale=1 / 16,
    )  # fmt: skip
    for t in range(75):
        assert sorted(got[t].tolist()) == sorted(want[t].tolist())
