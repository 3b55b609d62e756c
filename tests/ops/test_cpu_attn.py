"""The C attention: float64 reference, page and window borders, invariance to the bit."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from metainfer.core.errors import InternalError
from metainfer.kernels import native
from metainfer.ops.attn_paged import cpu_c, ref
from tests.ops.cpu_cases import BUILDS, needs_compiler, poisoned, seeded, threads  # noqa: F401

pytestmark = needs_compiler

BUILD_IDS = [str(build) for build in BUILDS]


@dataclass
class Batch:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    start: torch.Tensor
    context: torch.Tensor
    window: int = 0

    def run(self, build: tuple[str, ...] = ()) -> torch.Tensor:
        return cpu_c.attn_paged(
            *(self.q, self.k, self.v, self.table, self.start, self.context),
            scale=self.q.shape[2] ** -0.5,
            window=self.window,
            defines=build,
        )

    def exact(self) -> torch.Tensor:
        return ref.attn_paged(
            *(self.q.double(), self.k.double(), self.v.double()),
            *(self.table, self.start, self.context),
            scale=self.q.shape[2] ** -0.5,
            window=self.window,
        )


def paged(
    keys: list[torch.Tensor],  # per sequence [context, Hkv, D]
    values: list[torch.Tensor],
    queries: list[torch.Tensor],  # per sequence [n, Hq, D]
    page: int,
    window: int = 0,
) -> Batch:
    """Scatters sequences over shuffled pages; every slot that may not be read holds NaN."""
    contexts = [len(k) for k in keys]
    shape = (sum(-(-c // page) for c in contexts) + 2, page, *keys[0].shape[1:])
    k_cache, v_cache = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    free = torch.randperm(shape[0]).tolist()
    table = torch.full((len(keys), max(1, *(-(-c // page) for c in contexts))), -1).int()
    for s, context in enumerate(contexts):
        n = len(queries[s])
        low = max(0, context - n - window + 1) if window else 0
        for w in range(low // page, -(-context // page)):
            table[s, w] = free.pop()
            for cache, rows in ((k_cache, keys[s]), (v_cache, values[s])):
                first, last = max(low, w * page), min(context, (w + 1) * page)
                cache[table[s, w], first - w * page : last - w * page] = rows[first:last]
    start = torch.tensor([0, *(len(q) for q in queries)]).cumsum(0).int()
    context_lens = torch.tensor(contexts).int()
    return Batch(torch.cat(queries), k_cache, v_cache, table, start, context_lens, window)


def random_batch(
    lens: list[int],
    contexts: list[int],
    heads: tuple[int, int, int] = (6, 2, 64),
    page: int = 16,
    window: int = 0,
) -> Batch:
    hq, hkv, d = heads
    return paged(
        [torch.randn(c, hkv, d) for c in contexts],
        [torch.randn(c, hkv, d) for c in contexts],
        [torch.randn(n, hq, d) * 2 for n in lens],
        page,
        window,
    )


def check(batch: Batch, build: tuple[str, ...] = ()) -> None:
    found, exact = batch.run(build), batch.exact()
    assert torch.allclose(found.double(), exact, rtol=0, atol=5e-6), (found - exact).abs().max()


@pytest.mark.parametrize("build", BUILDS, ids=BUILD_IDS)
@pytest.mark.parametrize("page", [1, 4, 16, 64, 100])
def test_page_borders(page: int, build: tuple[str, ...]) -> None:
    contexts = [1, 15, 16, 17, 63, 64, 65, 128, 255, 256, 257]
    check(random_batch([1] * len(contexts), contexts, page=page), build)
    check(random_batch([min(c, 5) for c in contexts], contexts, page=page), build)


@pytest.mark.parametrize("build", BUILDS, ids=BUILD_IDS)
def test_chunks_decode_and_empty_sequences_mixed(build: tuple[str, ...]) -> None:
    check(random_batch([5, 0, 1, 70, 0, 33], [5, 9, 64, 130, 3, 300]), build)
    check(random_batch([130], [130]), build)
    check(random_batch([0, 0], [4, 4]), build)


@pytest.mark.parametrize("build", BUILDS, ids=BUILD_IDS)
@pytest.mark.parametrize("window", [1, 2, 16, 17, 64, 65, 300])
def test_windows(window: int, build: tuple[str, ...]) -> None:
    check(random_batch([1, 1, 40, 3], [65, 600, 333, 64], window=window), build)


@pytest.mark.parametrize("heads", [(1, 1, 16), (9, 3, 64), (8, 1, 128), (4, 4, 80), (7, 1, 256)])
def test_head_shapes(heads: tuple[int, int, int]) -> None:
    for build in BUILDS:
        check(random_batch([1, 20, 2], [40, 90, 2], heads), build)


@pytest.mark.parametrize("build", BUILDS, ids=BUILD_IDS)
@pytest.mark.parametrize("window", [0, 37])
def test_chunking_neighbours_pages_and_threads_change_no_bit(
    window: int, build: tuple[str, ...]
) -> None:
    n = 300
    k, v, q = torch.randn(n, 2, 32), torch.randn(n, 2, 32), torch.randn(n, 6, 32) * 3
    whole = paged([k], [v], [q], 16, window).run(build)
    for page, count in ((16, 1), (16, 3), (7, 2), (64, 2)):
        torch.set_num_threads(count)
        parts = []
        for low, high in ((0, 1), (1, 90), (90, 91), (91, 256), (256, 299), (299, 300)):
            other = torch.randn(50, 2, 32)
            batch = paged(
                *([other, k[:high]], [other, v[:high]]),
                [torch.randn(9, 6, 32), q[low:high]],
                page,
                window,
            )
            parts.append(batch.run(build)[9:])
        assert torch.equal(torch.cat(parts), whole), (page, count)


def test_decode_of_a_long_context_splits_alike_for_any_thread_count() -> None:
    batch = random_batch([1, 2], [1500, 700])
    results = []
    for count in (1, 2, 4, 8):
        torch.set_num_threads(count)
        results.append(batch.run())
    assert all(torch.equal(results[0], other) for other in results)
    check(batch)


def test_error_is_at_most_that_of_the_reference_path() -> None:
    """Law 2: at most 1.25 times the error of the same arithmetic in float32 by torch."""
    for lens, contexts in (([200], [600]), ([1, 1], [900, 70])):
        batch = random_batch(lens, contexts, (9, 3, 64))
        exact = batch.exact()
        inputs = (batch.q, batch.k, batch.v, batch.table, batch.start, batch.context)
        plain = ref.attn_paged(*inputs, scale=0.125)
        ours = (batch.run() - exact).square().mean().sqrt()
        assert ours <= 1.25 * (plain - exact).square().mean().sqrt()


def test_scores_far_apart_do_not_overflow() -> None:
    batch = random_batch([3], [150])
    batch.q *= 300
    check(batch)


def test_nan_query_stays_in_its_row() -> None:
    batch = random_batch([1, 4], [30, 70])
    batch.q[2, 1, 0] = float("nan")
    out = batch.run()
    assert out[2, 1].isnan().all()
    out[2, 1] = 0
    assert not out.isnan().any()


def test_queries_may_be_a_view_of_fused_rows() -> None:
    batch = random_batch([2, 1], [30, 70])
    dense = batch.run()
    fused = torch.full((3, 6 * 64 + 50), float("nan"))
    fused[:, 10 : 10 + 6 * 64] = batch.q.flatten(1)
    batch.q = fused[:, 10 : 10 + 6 * 64].view(3, 6, 64)
    assert torch.equal(batch.run(), dense)


def test_caches_may_be_one_allocation() -> None:
    batch = random_batch([2, 1], [30, 70])
    both = torch.stack((batch.k, batch.v), dim=1)
    dense = batch.run()
    batch.k, batch.v = both[:, 0], both[:, 1]
    assert torch.equal(batch.run(), dense)


def test_a_missing_page_is_an_error_not_a_read() -> None:
    batch = random_batch([1], [70])
    batch.table[0, 1] = -1
    with pytest.raises(InternalError, match="missing"):
        batch.run()
    batch.table[0, 1] = 10_000
    with pytest.raises(InternalError, match="missing"):
        batch.run()
    batch = random_batch([2], [70])
    batch.context[0] = 1
    with pytest.raises(InternalError, match="context"):
        batch.run()
    batch.context[0] = 1000
    with pytest.raises(InternalError, match="context"):
        batch.run()


def test_padding_alone_is_no_sequence_whatever_its_strides() -> None:
    """A domain without requests brings tables without rows; numpy gives these strides of zero."""
    batch = random_batch([2], [20])
    batch.table = torch.from_numpy(np.zeros((3, 2), np.int32)[:0])
    batch.context = torch.from_numpy(np.zeros(0, np.int64).astype(np.int32))
    batch.start = torch.zeros(1, dtype=torch.int32)
    assert batch.context.stride() == (0,)
    assert batch.run().shape == batch.q.shape


def test_refusals() -> None:
    batch = random_batch([1], [20])
    batch.q = batch.q.double()
    with pytest.raises(InternalError, match="float32"):
        batch.run()
    with pytest.raises(InternalError, match="width"):
        random_batch([1], [20], (2, 1, 24)).run()
    batch = random_batch([1], [20])
    batch.table = batch.table.long()
    with pytest.raises(InternalError, match="int32"):
        batch.run()
    batch = random_batch([3], [20])
    batch.q = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(InternalError, match="packed"):
        batch.run()


@pytest.mark.parametrize("build", BUILDS, ids=BUILD_IDS)
def test_exp_is_within_its_stated_error(build: tuple[str, ...]) -> None:
    """1.1 ulp of float32 for [-87, 0], exact at 0, 0 below, NaN kept."""
    function = native.load(cpu_c.SOURCE, defines=build).mi_exp
    x = torch.cat((torch.linspace(-87, 0, 1 << 16), -torch.rand(1 << 14) * 1e-3)).contiguous()
    y = torch.full_like(x, float("nan"))
    function(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(len(x)))
    exact = x.double().exp()
    ulp = torch.exp2(torch.floor(torch.log2(exact)) - 23)
    assert float(((y.double() - exact).abs() / ulp).max()) <= 1.1
    special = torch.tensor([0.0, -0.0, -87.1, -1e30, -math.inf, math.nan] + [0.0] * 10)
    y = torch.full_like(special, float("nan"))
    function(ctypes.c_void_p(special.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(16))
    assert y[:5].tolist() == [1, 1, 0, 0, 0] and y[5].isnan()
