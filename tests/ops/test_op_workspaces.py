"""B-19: what ops allocate beside their results, against what the ledger counts for them.

Kernels are launched on nothing: their calls allocate on the host what they would on a card.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from metainfer.core.step import Phase
from metainfer.engine.elsewhere import describe
from metainfer.executor.peaks import peaks
from metainfer.kernels.impl import Context, Impl, OpRequest
from metainfer.models.arch import Arch
from metainfer.ops.attn_paged import torch_sdpa
from metainfer.ops.attn_paged.masks import WORKSPACE
from metainfer.ops.attn_sparse import torch_sparse
from metainfer.ops.attn_sparse import triton_calls as attention
from metainfer.ops.attn_sparse.tiles import PLACE_BYTES
from metainfer.ops.catalog import builtin_registry
from metainfer.ops.sample import triton_calls as sampling
from metainfer.ops.sample.inputs import SampleInputs
from metainfer.ops.workspaces import FILTER_BYTES
from metainfer.planner.opening import open_model


class NoLaunch:
    """A kernel that does nothing on any grid."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **kwargs: None


def unlaunched(monkeypatch: pytest.MonkeyPatch, calls: Any) -> None:
    for name in [name for name in vars(calls) if name.endswith("_kernel")]:
        monkeypatch.setattr(calls, name, NoLaunch())


def peak(run: Any) -> int:
    (found,) = peaks(torch.device("cpu"), [run])
    return found


@pytest.mark.parametrize("filtered", [True, False])
def test_b19_a_filtered_draw_takes_what_the_ledger_counts_for_a_logit(
    monkeypatch: pytest.MonkeyPatch, filtered: bool
) -> None:
    unlaunched(monkeypatch, sampling)
    rows, vocab = 4, 40_000
    logits, whole = torch.zeros(rows, vocab), torch.zeros(rows, dtype=torch.int64)
    inputs = SampleInputs(
        temperature=torch.ones(rows), seed=whole, index=whole, top_k=whole if filtered else None
    )
    most = peak(lambda: sampling.sample(logits, inputs))
    counted = rows * vocab * FILTER_BYTES
    parts = rows * vocab // 20  # bins and sums of parts of a row
    assert most < parts if not filtered else counted < most < counted + rows * vocab * 2


@pytest.mark.parametrize(("picked", "ratio"), [(0, 0), (12, 4), (0, 4)])
def test_b19_attention_takes_eight_bytes_for_each_key_of_each_query(
    monkeypatch: pytest.MonkeyPatch, picked: int, ratio: int
) -> None:
    unlaunched(monkeypatch, attention)
    rows, window, pages, entries = 300, 24, 5, 16
    form = SimpleNamespace(scale="none", width=32, tail=0, bytes=64)
    held = SimpleNamespace(form=form, entries=entries, data=torch.zeros(1))
    table = torch.zeros((1, pages), dtype=torch.int32)
    chosen = torch.zeros((rows, picked), dtype=torch.int32) if picked else None
    order = torch.zeros(rows, dtype=torch.int64)
    local: Any = held
    far, far_table = (local, table) if ratio else (None, None)

    def run() -> None:
        attention._located(local, table, far, far_table, chosen, order, order, window, ratio, False)

    most = peak(run)
    keys = window + (picked or pages * entries if ratio else 0)
    assert PLACE_BYTES * rows * keys + 4 * rows <= most <= PLACE_BYTES * rows * keys + 5 * rows


def arch_of(model: str) -> Arch:
    return open_model(model).facts.arch


def test_b19_places_of_a_long_context_are_in_the_ledger() -> None:
    """Attention over every entry of 128 tokens: a query of a million tokens has 8,192 of them."""
    arch: Any = arch_of("random:deepseek-v4-flash?layers=12")
    rows = 4096
    short, long = (
        replace(arch, max_context=n).activation_bytes(rows, 1, 2) for n in (1 << 17, 1 << 20)
    )
    assert long - short == rows * PLACE_BYTES * ((1 << 20) - (1 << 17)) // 128
    assert short == pytest.approx(1_071_501_824, rel=0.03)  # as measured on an H200


@pytest.mark.parametrize(
    "model", ["random:qwen3-8b", "random:deepseek-v4-flash?layers=12", "random:glm-5.3"]
)
def test_b19_many_logits_are_counted_with_what_draws_from_them(model: str) -> None:
    arch = arch_of(model)
    few, many = (arch.activation_bytes(64, rows, 2) for rows in (1000, 2000))
    assert many - few == 1000 * arch.vocab_size * (4 + FILTER_BYTES)
    # Logits come when the layers are over: a long chunk's peak does not grow by one of them.
    assert arch.activation_bytes(4096, 1, 2) == arch.activation_bytes(4096, 0, 2)


def chunk(op: str, impl: str, **shape: int) -> tuple[Impl, Context]:
    (found,) = [each for each in builtin_registry().of(op) if each.name == impl]
    request = OpRequest(op, op, Phase.CHUNK, "bfloat16", shape)
    return found, Context(request, describe("1x-h200").facts)


def test_b19_what_is_decoded_of_a_cache_is_in_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests with full tables: their entries and windows, in whole pages."""
    unlaunched(monkeypatch, attention)
    rows, sequences, window, page, ratio, width, d = 600, 3, 24, 16, 4, 12, 128
    form = SimpleNamespace(scale="e8m0", width=d, tail=64, bytes=d + 80)
    order = torch.zeros(rows, dtype=torch.int64)
    span: Any = (order, order[:4].int(), order[:3].int(), torch.bfloat16)

    def pages(entries: int) -> Any:
        return SimpleNamespace(group=0, form=form, entries=entries, data=torch.zeros(1, 1))

    table = torch.zeros((sequences, width), dtype=torch.int32)
    kept: list[Any] = []

    def run() -> None:
        kept.append(attention.decoded(pages(page), table, *span, window=window))
        kept.append(attention.decoded(pages(page // ratio), table, *span, ratio=ratio))

    shape = {"rows": rows, "seqs": sequences, "d": d, "window": window, "ratio": ratio}
    impl, context = chunk(
        "attn_sparse", "triton-fp8", **shape, page=page // ratio, context=width * page, top_k=0
    )
    assert impl.copies is not None
    tables = 2 * table.nbytes
    assert 0.9 * impl.copies(context) < peak(run) <= impl.copies(context) + tables


def test_b19_what_sparse_attention_gathers_through_torch_is_in_the_ledger() -> None:
    """Of one request, whatever others have: all entries while they are few, then those of a
    block."""
    shape = {"rows": 64, "seqs": 8, "d": 512, "window": 128, "ratio": 4}
    impl, few = chunk("attn_sparse", "torch", **shape, context=4096)
    _, many = chunk("attn_sparse", "torch", **shape, context=1 << 22)
    assert impl.copies is not None
    near = (64 + 128) * 512 * 2
    assert impl.copies(few) == 1024 * 512 * 2 + near
    assert impl.copies(many) == 2 * torch_sparse.HELD + near


def test_b19_what_attention_gathers_of_a_cache_is_in_the_ledger() -> None:
    """One request after the other: never the keys of two at once."""
    heads, d, page, length = 2, 64, 16, 2048
    pages = length // page
    caches = [torch.zeros(pages, page, heads, d) for _ in "kv"]
    table = torch.arange(pages, dtype=torch.int32).repeat(3, 1)
    q, starts = torch.zeros(3, heads, d), torch.arange(4, dtype=torch.int32)
    lengths = torch.full((3,), length, dtype=torch.int32)
    impl, context = chunk("attn_paged", "torch", hkv=heads, d=d, context=length)
    assert impl.copies is not None
    gathered = 2 * (impl.copies(context) - WORKSPACE)  # float32 here
    most = peak(lambda: torch_sdpa.attn_paged(q, *caches, table, starts, lengths, scale=1.0))
    assert gathered < most < 1.25 * gathered
