"""The small C ops: norm, rope, swiglu, cache write."""

from __future__ import annotations

import pytest
import torch

from metainfer.core.errors import InternalError
from metainfer.ops.activation import cpu_c as activation
from metainfer.ops.activation import ref as activation_ref
from metainfer.ops.kv_write import cpu_c as kv_write
from metainfer.ops.kv_write import ref as kv_write_ref
from metainfer.ops.norm import cpu_c as norm
from metainfer.ops.norm import ref as norm_ref
from metainfer.ops.rope import cpu_c as rope
from metainfer.ops.rope import ref as rope_ref
from tests.ops.cpu_cases import BUILDS, needs_compiler, poisoned, seeded, threads  # noqa: F401

pytestmark = [needs_compiler, pytest.mark.parametrize("build", BUILDS, ids=str)]

ROWS = (0, 1, 2, 7, 33, 300)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 576])
def test_rmsnorm(width: int, build: tuple[str, ...]) -> None:
    weight = torch.randn(width)
    for rows in ROWS:
        x = torch.randn(rows, width + 3)[:, 1 : width + 1]
        residual = torch.randn(rows, width) * 5
        found = norm.rmsnorm(x, weight, 1e-5, defines=build)
        exact = norm_ref.rmsnorm(x.double(), weight.double(), 1e-5)
        assert torch.allclose(found.double(), exact, rtol=1e-6, atol=1e-30)
        normed, total = norm.add_rmsnorm(x, residual, weight, 1e-5, defines=build)
        assert torch.equal(total, x + residual)
        exact = norm_ref.rmsnorm(total.double(), weight.double(), 1e-5)
        assert torch.allclose(normed.double(), exact, rtol=1e-6, atol=1e-30)
        if rows:
            alone = norm.rmsnorm(x[-1:], weight, 1e-5, defines=build)
            assert torch.equal(alone, found[-1:])


def test_rmsnorm_refuses(build: tuple[str, ...]) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    with pytest.raises(InternalError):
        norm.rmsnorm(x.double(), weight, 1e-5, defines=build)
    with pytest.raises(InternalError):
        norm.rmsnorm(torch.randn(8, 3).T, weight, 1e-5, defines=build)
    with pytest.raises(InternalError):
        norm.rmsnorm(x, torch.randn(7), 1e-5, defines=build)
    with pytest.raises(InternalError):
        norm.add_rmsnorm(x, torch.randn(2, 8), weight, 1e-5, defines=build)


@pytest.mark.parametrize("width", [1, 16, 31, 1536])
def test_swiglu(width: int, build: tuple[str, ...]) -> None:
    for rows in ROWS:
        x = torch.randn(rows, 2 * width) * 8
        found = activation.swiglu(x, defines=build)
        exact = activation_ref.swiglu(x.double())
        assert torch.allclose(found.double(), exact, rtol=6e-7, atol=1e-30)


def test_swiglu_extremes(build: tuple[str, ...]) -> None:
    gate = torch.tensor([0.0, 90.0, -90.0, 1e30, -1e30, -20.0, float("nan")])
    found = activation.swiglu(torch.cat((gate, torch.ones(7)))[None], defines=build)[0]
    exact = activation_ref.swiglu(torch.cat((gate, torch.ones(7)))[None].double())[0]
    assert torch.allclose(found.double(), exact, rtol=1e-6, atol=1e-35, equal_nan=True)
    with pytest.raises(InternalError):
        activation.swiglu(torch.randn(2, 3), defines=build)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [16, 24, 64])
def test_rope(rotated: int, interleaved: bool, build: tuple[str, ...]) -> None:
    table = torch.randn(50, rotated)
    for rows in ROWS:
        fused = torch.randn(rows, 5 * 64)
        q, k = fused[:, : 3 * 64].view(rows, 3, 64), fused[:, 3 * 64 : 5 * 64].view(rows, 2, 64)
        positions = torch.randint(0, 50, (rows,))
        found = rope.rope(q, k, positions, table, interleaved, defines=build)
        exact = rope_ref.rope(q.double(), k.double(), positions, table, interleaved)
        for got, want in zip(found, exact, strict=True):
            assert torch.allclose(got.double(), want, rtol=0, atol=2e-6)
    for bad in (50, -1):
        with pytest.raises(InternalError, match="position"):
            q, k = torch.randn(1, 3, 64), torch.randn(1, 2, 64)
            rope.rope(q, k, torch.tensor([bad]), table, interleaved, defines=build)


def test_kv_write(build: tuple[str, ...]) -> None:
    for rows in ROWS:
        both = torch.full((30, 2, 16, 3, 8), float("nan"))
        k_cache, v_cache = both[:, 0], both[:, 1]
        want = k_cache.clone(), v_cache.clone()
        fused = torch.randn(rows, 60)
        k, v = fused[:, :24].view(rows, 3, 8), fused[:, 30:54].view(rows, 3, 8)
        slots = torch.randperm(30 * 16)[:rows]
        slots[::3] = -1
        kv_write.kv_write(k, v, k_cache, v_cache, slots, defines=build)
        kv_write_ref.kv_write(k, v, *want, slots)
        assert torch.equal(k_cache.nan_to_num(7), want[0].nan_to_num(7))
        assert torch.equal(v_cache.nan_to_num(7), want[1].nan_to_num(7))


def test_kv_write_outside_the_cache_writes_nothing(build: tuple[str, ...]) -> None:
    cache = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    for bad in (8, -2):
        with pytest.raises(InternalError, match="slot"):
            k = torch.ones(2, 1, 8)
            kv_write.kv_write(k, k, *cache, torch.tensor([0, bad]), defines=build)
    assert not cache[0].any() and not cache[1].any()
