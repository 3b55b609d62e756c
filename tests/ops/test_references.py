"""The references against `transformers`' modules and against definitions written another way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_pairs
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from metainfer.core.errors import ModelError
from metainfer.formats.quant import RawTensor, dequantise, quantise
from metainfer.kernels.impl import Impl
from metainfer.ops.activation.ref import swiglu
from metainfer.ops.attn_paged.ref import attn_paged
from metainfer.ops.catalog import builtin_registry
from metainfer.ops.embed.ref import embed
from metainfer.ops.kv_write.ref import kv_write
from metainfer.ops.linear.packed import pack_dense
from metainfer.ops.linear.ref import linear
from metainfer.ops.norm.ref import add_rmsnorm, rmsnorm
from metainfer.ops.rope.ref import rope
from metainfer.ops.rope.tables import RopeSpec, cos_sin

FREE = ("torch", "reference", "c")


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_rmsnorm_is_llama_s(seed: int) -> None:
    module = LlamaRMSNorm(96, eps=1e-5).double()
    module.weight.data = noise(seed, 96)
    x = noise(seed + 1, 7, 96, dtype=torch.float32)
    want = module.weight.data.float() * (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    torch.testing.assert_close(rmsnorm(x, module.weight.data.float(), 1e-5), want)
    single = LlamaRMSNorm(96, eps=1e-5)
    single.weight.data = module.weight.data.float()
    torch.testing.assert_close(rmsnorm(x, single.weight.data, 1e-5), single(x))


def test_add_rmsnorm_norms_the_rounded_sum(seed: int) -> None:
    x, residual = (noise(seed + i, 5, 64).bfloat16() for i in range(2))
    weight = torch.ones(64, dtype=torch.bfloat16)
    normed, total = add_rmsnorm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rmsnorm(total, weight, 1e-6))


def test_float64_stays_float64(seed: int) -> None:
    x, w = noise(seed, 3, 8), noise(seed + 1, 8)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-9).sqrt() * w
    torch.testing.assert_close(rmsnorm(x, w, 1e-9), want, rtol=1e-14, atol=0)
    gate, up = x[:, :4], x[:, 4:]
    torch.testing.assert_close(swiglu(x), F.silu(gate) * up, rtol=1e-14, atol=0)


@pytest.mark.parametrize("rotated", [64, 32])
def test_rope_is_llama_s(rotated: int, seed: int) -> None:
    table = cos_sin(RopeSpec(rotated=rotated), 300)
    q, k = noise(seed, 9, 4, 64), noise(seed + 1, 9, 2, 64)
    positions = torch.randint(300, (9,), generator=torch.Generator().manual_seed(seed))
    cos, sin = (half.double().repeat(1, 2)[positions] for half in table.chunk(2, -1))
    heads = (1, 0, 2)
    ours = rope(q, k, positions, table)
    theirs = apply_rotary_pos_emb(
        q[..., :rotated].permute(heads)[None],
        k[..., :rotated].permute(heads)[None],
        cos[None],
        sin[None],
    )
    for mine, want, original in zip(ours, theirs, (q, k), strict=True):
        torch.testing.assert_close(mine[..., :rotated], want[0].permute(heads))
        assert torch.equal(mine[..., rotated:], original[..., rotated:])


@pytest.mark.parametrize("rotated", [64, 32])
def test_interleaved_rope_is_glm_s(rotated: int, seed: int) -> None:
    table = cos_sin(RopeSpec(rotated=rotated), 300)
    q, k = noise(seed, 9, 4, 64), noise(seed + 1, 9, 2, 64)
    positions = torch.arange(9) * 31
    cos, sin = (half.double().repeat(1, 2)[positions] for half in table.chunk(2, -1))
    heads = (1, 0, 2)
    theirs = rotate_pairs(q.permute(heads)[None], k.permute(heads)[None], cos[None], sin[None])
    ours = rope(q, k, positions, table, interleaved=True)
    for mine, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, want[0].permute(heads))


def test_rope_keeps_length_and_relative_angle(seed: int) -> None:
    table = cos_sin(RopeSpec(rotated=16), 64)
    x = noise(seed, 1, 1, 16).expand(2, 1, 16).contiguous()
    for interleaved in (False, True):
        a, _ = rope(x, x, torch.tensor([3, 10]), table, interleaved)
        b, _ = rope(x, x, torch.tensor([23, 30]), table, interleaved)
        torch.testing.assert_close(a.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
        torch.testing.assert_close((a[0] * a[1]).sum(), (b[0] * b[1]).sum(), rtol=1e-5, atol=0)


class _Module:
    num_key_value_groups = 3
    training = False


def paged(
    seed: int, context: int, page: int, hkv: int, d: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Contiguous keys and values, the same in shuffled pages, and the page table."""
    pages = -(-context // page)
    k, v = noise(seed, context, hkv, d), noise(seed + 1, context, hkv, d)
    order = torch.randperm(pages + 1, generator=torch.Generator().manual_seed(seed))[:pages]
    caches = []
    for tensor in (k, v):
        flat = torch.full((pages * page, hkv, d), float("nan"), dtype=torch.float64)
        flat[:context] = tensor
        cache = torch.full((pages + 1, page, hkv, d), float("nan"), dtype=torch.float64)
        cache[order] = flat.view(pages, page, hkv, d)
        caches.append(cache)
    return k, v, caches[0], caches[1], order.to(torch.int32)[None]


@settings(max_examples=40)
@given(
    context=st.integers(1, 40),
    queries=st.integers(1, 40),
    page=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 1, 5, 100]),
)
def test_attention_is_llama_s(context: int, queries: int, page: int, window: int) -> None:
    queries = min(queries, context)
    hkv, d = 2, 8
    k, v, k_cache, v_cache, table = paged(context * 41 + queries, context, page, hkv, d)
    q = noise(queries, queries, 3 * hkv, d)
    own = torch.arange(context - queries, context)[:, None]
    key = torch.arange(context)[None]
    seen = (key <= own) & ((key > own - window) if window else True)
    mask = torch.zeros(queries, context, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    want, _ = eager_attention_forward(
        _Module(),  # type: ignore[arg-type]
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        mask[None, None],
        scaling=d**-0.5,
    )
    got = attn_paged(
        q, k_cache, v_cache, table,
        torch.tensor([0, queries], dtype=torch.int32), torch.tensor([context], dtype=torch.int32),
        scale=d**-0.5, window=window,
    )  # fmt: skip
    # The oracle's softmax is float32.
    torch.testing.assert_close(got, want[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [0, 7])
def test_attention_does_not_depend_on_chunks(window: int, seed: int) -> None:
    """One prompt in one call, in chunks, and token by token: the same to 1e-12."""
    context, page, hkv, d = 37, 4, 2, 8
    _, _, k_cache, v_cache, table = paged(seed, context, page, hkv, d)
    q = noise(seed + 5, context, 4, d)

    def run(cuts: list[int]) -> Tensor:
        parts, done = [], 0
        for cut in cuts:
            start = torch.tensor([0, cut], dtype=torch.int32)
            length = torch.tensor([done + cut], dtype=torch.int32)
            part = q[done : done + cut]
            parts.append(
                attn_paged(part, k_cache, v_cache, table, start, length, scale=1.0, window=window)
            )
            done += cut
        return torch.cat(parts)

    whole = run([context])
    for cuts in ([20, 17], [1] * context, [5, 1, 31]):
        torch.testing.assert_close(run(cuts), whole, rtol=0, atol=1e-12)


def test_sink_value_behind_the_window_is_not_seen(seed: int) -> None:
    """A key outside the window with a huge value: windowed output must differ from full."""
    _, _, k_cache, v_cache, table = paged(seed, 20, 4, 1, 8)
    v_cache[table[0, 0].long(), 0] = 1e6
    k_cache[table[0, 0].long(), 0] = 0
    start, length = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    q = noise(seed, 1, 1, 8)
    full, cut = (
        attn_paged(q, k_cache, v_cache, table, start, length, scale=1.0, window=w) for w in (0, 4)
    )
    assert full.abs().max() > 100 and cut.abs().max() < 10


@pytest.mark.parametrize("scheme", ["F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_1"])
def test_linear_and_embed_read_joined_parts(scheme: str, seed: int) -> None:
    dense = [noise(seed + i, n, 64) for i, n in enumerate((32, 8, 8))]
    if scheme.startswith("Q"):
        raws = [quantise(w, scheme) for w in dense]
    else:
        kind = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[scheme]
        raws = [RawTensor(scheme, tuple(w.shape), w.to(kind)) for w in dense]
    bias = noise(seed + 9, 48)
    packed = pack_dense(raws, bias, dtype=torch.float64, site="linear.qkv")
    matrix = torch.cat([dequantise(raw, torch.float64) for raw in raws])
    x = noise(seed + 7, 5, 64)
    torch.testing.assert_close(linear(x, packed), F.linear(x, matrix, bias))
    ids = torch.tensor([0, 47, 47, 32])
    assert torch.equal(embed(ids, packed), matrix[ids])
    assert packed.shape == (48, 64) and packed.site == "linear.qkv"
    assert packed.nbytes == 48 * 64 * 8 + 48 * 8
    assert packed.at_site("embed").data is packed.data


def test_packing_refuses_what_does_not_join() -> None:
    raws = [RawTensor("F32", (2, n), torch.zeros(2, n)) for n in (4, 5)]
    with pytest.raises(ModelError, match=r"\[2, 4\], \[2, 5\]"):
        pack_dense(raws, dtype=torch.float32)
    with pytest.raises(ModelError):
        pack_dense([RawTensor("F32", (4,), torch.zeros(4))], dtype=torch.float32)


def test_kv_write_round_trips_through_attention(seed: int) -> None:
    """What is written at a slot is what attention reads at that position."""
    page, hkv, d, context = 4, 2, 8, 11
    k, v = noise(seed, context, hkv, d), noise(seed + 1, context, hkv, d)
    table = torch.tensor([[4, 0, 2]], dtype=torch.int32)
    at = torch.arange(context)
    slots = table[0][at // page].long() * page + at % page
    caches = [torch.full((5, page, hkv, d), float("nan"), dtype=torch.float64) for _ in range(2)]
    kv_write(k, v, caches[0], caches[1], slots)
    q = noise(seed + 2, 1, hkv, d)
    start, length = (
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([context], dtype=torch.int32),
    )
    got = attn_paged(q, caches[0], caches[1], table, start, length, scale=1.0)
    weights = torch.softmax(torch.einsum("hd,khd->hk", q[0], k), -1)
    torch.testing.assert_close(got[0], torch.einsum("hk,khd->hd", weights, v))


# ---- slices of one fused projection --------------------------------------------------------------

SLICED = [
    impl
    for impl in builtin_registry().impls()
    if impl.op in ("rope", "kv_write", "attn_paged") and impl.provider in FREE
]


@pytest.mark.parametrize("impl", SLICED, ids=lambda impl: impl.id)
def test_slices_of_a_fused_projection_need_no_copy(impl: Impl, seed: int) -> None:
    """q, k, v as strided views give what contiguous copies give, bit for bit."""
    if impl.provider == "c":
        from metainfer.kernels import native

        if native.find_compiler() is None:
            pytest.skip("no C compiler")
    tokens, hq, hkv, d, page = 6, 4, 2, 64, 16
    fused = noise(seed, tokens, (hq + 2 * hkv) * d).float()
    q, k, v = (part.view(tokens, -1, d) for part in fused.split([hq * d, hkv * d, hkv * d], dim=-1))
    function = impl.resolve()
    positions = torch.arange(tokens)

    def run(copy: bool) -> list[Tensor]:
        a, b, c = (t.contiguous() if copy else t for t in (q, k, v))
        caches = [torch.zeros(2, page, hkv, d) for _ in range(2)]
        if impl.op == "rope":
            return list(function(a, b, positions, cos_sin(RopeSpec(rotated=d), 64)))  # type: ignore[call-overload]
        if impl.op == "kv_write":
            function(b, c, caches[0], caches[1], positions)
            return caches
        kv_write(b, c, caches[0], caches[1], positions)
        table = torch.tensor([[0]], dtype=torch.int32)
        start, length = (torch.tensor(x, dtype=torch.int32) for x in ([0, tokens], [tokens]))
        return [function(a, *caches, table, start, length, scale=0.1)]  # type: ignore[list-item]

    assert not q.is_contiguous()
    for mine, want in zip(run(False), run(True), strict=True):
        assert torch.equal(mine, want)


def test_scale_acts_on_scores(seed: int) -> None:
    """Scale 0 averages the visible values."""
    _, v, k_cache, v_cache, table = paged(seed, 9, 4, 1, 8)
    start, length = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    got = attn_paged(noise(seed, 1, 1, 8), k_cache, v_cache, table, start, length, scale=0.0)
    torch.testing.assert_close(got[0, 0], v[:, 0].mean(0))
