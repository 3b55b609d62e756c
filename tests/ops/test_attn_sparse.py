"""Sparse attention and its output projection against `transformers` and against loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepseek_oracle import TIGHT, config, filled, lifted, noise, packed, table, theirs
from entry_caches import NAN, Candidate, closing, double_key, double_latent, poisoned, where
from entry_caches import filled as paged
from entry_caches import table as page_table
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, StateRows
from metainfer.ops.activation.ref import swiglu_clamp
from metainfer.ops.attn_sparse import ref, torch_sparse
from metainfer.ops.common import rotate_tail
from metainfer.ops.compress.ref import visible_entries
from metainfer.ops.compress.torch_compress import compress
from metainfer.ops.hyper.ref import hyper_collapse, hyper_mix, hyper_triplet
from metainfer.ops.indexer.torch_select import index_query, index_select
from metainfer.ops.latent_qkv.torch_latent import latent_qkv
from metainfer.ops.moe_experts.ref import moe_experts
from metainfer.ops.moe_route.ref import moe_route
from metainfer.ops.norm.ref import rmsnorm
from metainfer.ops.out_group.ref import out_group

attn_sparse = Candidate(ref.attn_sparse)


PATHS: dict[str, tuple[Any, dict[str, int]]] = {
    "ref": (ref, {}),
    "torch": (torch_sparse, {}),
    "torch-shared": (torch_sparse, {"SHARED": 1, "QUERIES": 3}),
    "torch-not-held": (torch_sparse, {"SHARED": 1, "HELD": 0}),
    "torch-tiny-blocks": (torch_sparse, {"SHARED": 3, "BLOCK": 1}),
}


@pytest.fixture(params=PATHS, autouse=True, scope="module")
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    module, limits = PATHS[request.param]
    attn_sparse.op = module.attn_sparse
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(torch_sparse, name, value)
        yield


def attend(
    q: Tensor, tokens: Tensor, entries: Tensor | None, picks: Tensor | None, sinks: Tensor,
    turn: Tensor, first: int, *, scale: float, window: int, ratio: int, page: int = 4,
) -> Tensor:  # fmt: skip
    """One sequence whose first query stands at `first`; tokens and entries go into pages, and
    rows after the last token are padding."""
    d, rows = q.shape[2], min(q.shape[0], len(tokens) - first)
    local, local_table = paged([tokens], page, double_latent(d))
    pages = entry_table = None
    if entries is not None:
        pages, entry_table = paged([entries], page - 1, double_latent(d), seed=1)
    positions = torch.zeros(q.shape[0], dtype=torch.int64)
    positions[:rows] = torch.arange(first, first + rows)
    return attn_sparse(
        q, local, local_table, pages, entry_table, picks, sinks, turn, positions,
        *where([rows], [first + rows]), scale=scale, window=window, ratio=ratio,
    )  # fmt: skip


def turns(seed: int, length: int, rotated: int) -> Tensor:
    angle = noise(seed, length, rotated // 2) * 3
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


@settings(max_examples=40)
@given(st.data())
def test_by_hand(data: st.DataObject) -> None:
    """Head by head and key by key in plain Python; the rest of the caches is NaN."""
    window, ratio = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0, 1, 3, 4]))
    rows, first = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 14))
    every, sink = data.draw(st.booleans()), data.draw(st.sampled_from([-50.0, 0.0, 4.0]))
    seed, heads, d = data.draw(st.integers(0, 9999)), 2, 6
    g = torch.Generator().manual_seed(seed)
    total = first + rows
    q, turn = noise(seed, rows, heads, d) * 2, turns(seed + 1, total, 4)
    tokens = torch.full((total, d), NAN, dtype=torch.float64)
    low = max(0, first - window + 1)
    tokens[low:] = noise(seed + 2, total - low, d)
    entries = torch.full((total + 1, d), NAN, dtype=torch.float64)
    sinks = torch.tensor([sink, sink + 1], dtype=torch.float64)
    picks = torch.full((rows, 3), -1, dtype=torch.int32)
    lists: list[list[int]] = []
    for j in range(rows):
        seen = (first + j + 1) // ratio if ratio else 0
        mine = list(range(seen)) if every else torch.randperm(seen, generator=g)[:3].tolist()
        lists.append(mine)
        if not every:
            picks[j, 3 - len(mine) :] = torch.tensor(mine, dtype=torch.int32)
        entries[mine] = noise(seed + 3, total + 1, d)[mine]
    got = attend(
        q, tokens, entries if ratio else None, None if every else picks, sinks, turn, first,
        scale=0.5, window=window, ratio=ratio,
    )  # fmt: skip
    for j in range(rows):
        t = first + j
        keys = [tokens[p] for p in range(max(0, t - window + 1), t + 1)]
        keys += [entries[w] for w in lists[j]]
        for h in range(heads):
            logits = [0.5 * float(q[j, h] @ key) for key in keys]
            top = max([*logits, float(sinks[h])])
            whole = sum(math.exp(v - top) for v in logits) + math.exp(float(sinks[h]) - top)
            mix = sum(math.exp(v - top) / whole * key for v, key in zip(logits, keys, strict=True))
            want = rotate_tail(mix, turn[t], inverse=True)
            torch.testing.assert_close(got[j, h], want, rtol=1e-10, atol=1e-12)


def test_only_listed_entries_are_read(seed: int) -> None:
    """A row that lists fewer than it may: entry 0 is poison, and stays out."""
    entries = torch.full((22, 6), NAN, dtype=torch.float64)
    entries[3:8] = noise(seed, 5, 6)
    picks = torch.tensor([[3, 4, 5], [-1, 7, -1]], dtype=torch.int32)
    q, tokens = noise(seed + 1, 2, 2, 6), noise(seed + 2, 22, 6)
    got = attend(
        q, tokens, entries, picks, noise(seed + 3, 2), turns(seed, 22, 4), 20,
        scale=0.5, window=3, ratio=1,
    )  # fmt: skip
    assert not got.isnan().any()


def test_the_inverse_turns_back(seed: int) -> None:
    x, turn = noise(seed, 3, 10), turns(seed + 1, 3, 6)
    there = rotate_tail(x, turn)
    torch.testing.assert_close(rotate_tail(there, turn, inverse=True), x, **TIGHT)
    assert torch.equal(there[:, :4], x[:, :4]) and not torch.equal(there, x)
    a, b = x[1, 6], x[1, 7]
    torch.testing.assert_close(there[1, 6], a * turn[1, 1] - b * turn[1, 4], **TIGHT)


def test_a_strong_sink_takes_all_and_padding_is_left(seed: int, poison: None) -> None:
    q = torch.full((4, 2, 6), NAN, dtype=torch.float64)
    q[:3] = noise(seed, 3, 2, 6)
    tokens, sinks = noise(seed, 3, 6), torch.tensor([500.0, -500.0])
    got = attend(q, tokens, None, None, sinks, turns(seed, 3, 2), 0, scale=1.0, window=2, ratio=0)
    assert got[:3, 0].abs().max() < 1e-100 and got[:3, 1].abs().min() > 0
    assert torch.equal(got[3], torch.zeros(2, 6).double())


@settings(max_examples=15)
@given(st.lists(st.integers(0, 21), max_size=5), st.booleans())
def test_any_chunks_give_one_pass(cuts: list[int], every: bool) -> None:
    total, ratio = 21, 4
    q, tokens, entries = noise(1, total, 2, 6), noise(2, total, 6), noise(3, 5, 6)
    sinks, turn = noise(4, 2), turns(5, total, 4)
    seen = visible_entries(torch.arange(total), ratio)
    picks = torch.stack((seen - 1, torch.where(seen > 2, 0, -1)), dim=1).int()

    def part(a: int, b: int) -> Tensor:
        return attend(
            q[a:b], tokens[:b], entries, None if every else picks[a:b], sinks, turn, a,
            scale=0.4, window=5, ratio=ratio,
        )  # fmt: skip

    borders = [0, *sorted(cuts), total]
    got = torch.cat([part(a, b) for a, b in itertools.pairwise(borders)])
    torch.testing.assert_close(got, part(0, total), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("heads", "groups"), [(6, 3), (4, 1), (4, 4)])
def test_out_group_by_hand(heads: int, groups: int, seed: int) -> None:
    o, k = noise(seed, 5, heads, 7), heads * 7 // groups
    weight = noise(seed + 1, groups, 9, k)
    flat = o.reshape(5, heads * 7)
    want = torch.cat([flat[:, i * k : (i + 1) * k] @ weight[i].T for i in range(groups)], dim=1)
    torch.testing.assert_close(out_group(o, packed(weight), groups=groups), want, **TIGHT)
    assert out_group(o[:0], packed(weight), groups=groups).shape == (0, groups * 9)


# ---- transformers: a whole attention block, a whole layer ----------------------------------------


def entries_of(
    module: Any, x: Tensor, turn: Tensor, ratio: int, key: bool = False
) -> tuple[EntryPages, Tensor]:
    count, d, width = len(x), module.kv_norm.weight.shape[0], module.position_bias.shape[1]
    state = StateRows(0, torch.full((2, 2, ratio * 2, width), NAN, dtype=torch.float64))
    found, total = page_table([count // ratio], 2)
    pages = poisoned(double_key(d) if key else double_latent(d), total, 2)
    compress(
        module.kv_proj(x), module.gate_proj(x), module.position_bias, module.kv_norm.weight, turn,
        state, torch.tensor([0]), pages, closing(found[0], 2, 0, count, ratio),
        *where([count], [count]), ratio=ratio, overlap=ratio == 4, eps=1e-6,
    )  # fmt: skip
    return pages, found


def attention(module: Any, x: Tensor, turn: Tensor, ratio: int, top_k: int) -> Tensor:
    """Our ops with their weights."""
    count, heads, d = x.shape[0], module.num_heads, module.head_dim
    places, span = torch.arange(count), where([count], [count])
    qr = rmsnorm(module.q_a_proj(x), module.q_a_norm.weight, 1e-6)
    local_table, total = page_table([count], 16)
    local = poisoned(double_latent(d), total, 16)
    q = latent_qkv(
        module.q_b_proj(qr).view(count, heads, d), module.kv_proj(x), module.kv_norm.weight,
        places, turn, local, closing(local_table[0], 16, 0, count, 1), eps=1e-6, norm_q=True,
    )  # fmt: skip
    entries = entry_table = selected = None
    if ratio:
        entries, entry_table = entries_of(module.compressor, x, turn, ratio)
    if ratio == 4:
        indexer = module.compressor.indexer
        keys, key_table = entries_of(indexer, x, turn, 4, key=True)
        iq = indexer.q_b_proj(qr).view(count, indexer.num_heads, indexer.head_dim)
        selected = index_select(
            index_query(iq, places, turn, keys.form), indexer.scorer.weights_proj(x),
            keys, key_table, places, *span, ratio=4, top_k=top_k, scale=1 / 16,
        )  # fmt: skip
    mixed = attn_sparse(
        q, local, local_table, entries, entry_table, selected, module.sinks, turn, places, *span,
        scale=d**-0.5, window=8, ratio=ratio,
    )  # fmt: skip
    groups = module.o_a_proj.n_groups
    return module.o_b_proj(out_group(mixed, packed(module.o_a_proj.weight), groups=groups))


def causal(count: int, window: int) -> Tensor:
    """Their mask of the local branch."""
    key, own = torch.arange(count), torch.arange(count).unsqueeze(1)
    seen = (key <= own) & (key > own - window)
    return torch.zeros(1, 1, count, count).double().masked_fill(~seen, float("-inf"))


@pytest.mark.parametrize(("layer", "ratio"), [(0, 0), (2, 4), (3, 16)])
def test_is_transformers_attention(layer: int, ratio: int, seed: int) -> None:
    """Window layer, CSA with a selection of 4 out of 18, HCA with all entries: 75 tokens."""
    settings_, x = config(), noise(seed, 75, 64)
    with lifted(), torch.no_grad():
        module: Any = filled(theirs.DeepseekV4Attention(settings_, layer), seed)
        rotary = theirs.DeepseekV4RotaryEmbedding(settings_)
        kind = "compress" if ratio else "main"
        turn = table(rotary, kind, 80)
        cos, sin = turn[:75].chunk(2, dim=-1)
        places = torch.arange(75)[None]
        want, _ = module(x[None], {kind: (cos[None], sin[None])}, places, causal(75, 8), None)
        got = attention(module, x, turn, ratio, 4)
    torch.testing.assert_close(got, want[0], **TIGHT)


def test_is_transformers_layer(seed: int) -> None:
    """Streams in, streams out: every op of this folder's family in one CSA layer."""
    settings_, streams = config(), noise(seed, 40, 4, 64)
    with lifted(), torch.no_grad():
        layer: Any = filled(theirs.DeepseekV4DecoderLayer(settings_, 2), seed)
        turn = table(theirs.DeepseekV4RotaryEmbedding(settings_), "compress", 40)
        cos, sin = turn.chunk(2, dim=-1)
        want = layer(
            streams[None], position_embeddings={"compress": (cos[None], sin[None])},
            position_ids=torch.arange(40)[None], attention_mask=causal(40, 8), input_ids=None,
        )  # fmt: skip

        def site(hc: Any, streams: Tensor, norm: Any, block: Any) -> Tensor:
            pre, post, comb = hyper_triplet(
                streams, hc.fn, hc.base, hc.scale, norm_eps=1e-6, eps=1e-6, iters=20
            )
            x = rmsnorm(hyper_collapse(streams, pre), norm.weight, 1e-6)
            return hyper_mix(streams, block(x), post, comb)

        def moe(x: Tensor) -> Tensor:
            gate, experts, shared = layer.mlp.gate, layer.mlp.experts, layer.mlp.shared_experts
            ids, weights = moe_route(
                x, gate.weight, gate.e_score_correction_bias, top_k=2, scale=1.5
            )
            routed = moe_experts(
                x, ids, weights, packed(experts.gate_up_proj), packed(experts.down_proj), limit=10.0
            )
            both = torch.cat((shared.gate_proj(x), shared.up_proj(x)), dim=-1)
            return routed + shared.down_proj(swiglu_clamp(both, 10.0))

        middle = site(
            layer.attn_hc, streams, layer.input_layernorm,
            lambda x: attention(layer.self_attn, x, turn, 4, 4),
        )  # fmt: skip
        got = site(layer.ffn_hc, middle, layer.post_attention_layernorm, moe)
    torch.testing.assert_close(got, want[0], **TIGHT)
