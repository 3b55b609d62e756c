"""B-19: attention through torch takes its queries in blocks, so that masks stay bounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metainfer.executor.peaks import peaks
from metainfer.ops.attn_paged import ref, torch_sdpa

HKV, GROUP, D, PAGE = 2, 3, 16, 8


def step(lengths: list[tuple[int, int]], dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    """Sequences of (queries, context); what nobody may read is NaN or -1."""
    random = torch.Generator().manual_seed(seed)
    pages = [-(-context // PAGE) for _, context in lengths]
    caches = [
        torch.randn(sum(pages) + 1, PAGE, HKV, D, generator=random, dtype=dtype) for _ in "kv"
    ]
    table = torch.full((len(lengths), max(pages) + 1), -1, dtype=torch.int32)
    order = torch.randperm(sum(pages), generator=random).int()
    at = 0
    for number, (count, (_, context)) in enumerate(zip(pages, lengths, strict=True)):
        table[number, :count] = order[at : at + count]
        if context % PAGE:
            for cache in caches:
                cache[order[at + count - 1], context % PAGE :] = float("nan")
        at += count
    for cache in caches:
        cache[-1] = float("nan")
    queries = torch.tensor([0, *(n for n, _ in lengths)]).cumsum(0).int()
    q = torch.randn(int(queries[-1]), HKV * GROUP, D, generator=random, dtype=dtype)
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    return q, caches[0], caches[1], table, queries, contexts


@pytest.mark.parametrize("window", [0, 1, 5, 300])
@pytest.mark.parametrize("block", [1, 3, 1000])
def test_blocks_of_queries_see_what_one_block_sees(
    monkeypatch: pytest.MonkeyPatch, seed: int, window: int, block: int
) -> None:
    lengths = [(7, 7), (1, 20), (0, 9), (13, 40), (3, 100)]
    inputs = step(lengths, torch.float64, seed)
    monkeypatch.setattr(torch_sdpa, "mask_bytes", lambda keys, element: 1)
    monkeypatch.setattr(torch_sdpa, "WORKSPACE", block)
    got = torch_sdpa.attn_paged(*inputs, scale=0.3, window=window)
    want = ref.attn_paged(*inputs, scale=0.3, window=window)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_b19_masks_of_a_long_chunk_stay_in_their_workspace(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """256 queries of 2,048 tokens see half a MiB of marks, as numbers four times that."""
    monkeypatch.setattr(torch_sdpa, "WORKSPACE", 1 << 18)
    inputs = step([(256, 2048)], torch.float32, seed)

    def run() -> None:
        torch_sdpa.attn_paged(*inputs, scale=1.0)

    (most,) = peaks(torch.device("cpu"), [run])
    gathered = 2 * 2048 * HKV * D * 4
    queries = inputs[0].nbytes
    assert gathered < most < gathered + 2 * queries + (1 << 19)
