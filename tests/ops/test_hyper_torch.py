"""Hyper-connections in few launches against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from metainfer.ops.hyper import ref, torch_hyper

EPS = {"norm_eps": 1e-6, "eps": 1e-6}


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def site(seed: int, n: int, d: int) -> tuple[Tensor, ...]:
    """fn, base, scale and the norm's weight."""
    many = (n + 2) * n
    shapes = ((many, n * d), (many,), (3,), (d,))
    return tuple(noise(seed + i, *shape) for i, shape in enumerate(shapes))


@given(
    st.integers(0, 5), st.integers(1, 5), st.integers(1, 9), st.integers(1, 20),
    st.sampled_from([1e-6, 1e-2]), st.integers(0, 2**20),
)  # fmt: skip
def test_pre_is_the_reference(t: int, n: int, d: int, iters: int, eps: float, seed: int) -> None:
    streams, args = noise(seed + 9, t, n, d), site(seed, n, d)
    kwargs = {"norm_eps": 1e-5, "eps": eps, "iters": iters}
    got = torch_hyper.hyper_pre(streams, *args, **kwargs)
    want = ref.hyper_pre(streams, *args, **kwargs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert all(tensor.is_contiguous() for tensor in got)


@given(st.integers(0, 5), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**20))
def test_mix_and_head_are_the_references(t: int, n: int, d: int, seed: int) -> None:
    streams, y = noise(seed, t, n, d), noise(seed + 1, t, d)
    post, comb = noise(seed + 2, t, n), noise(seed + 3, t, n, n)
    got = torch_hyper.hyper_mix(streams, y, post, comb)
    torch.testing.assert_close(got, ref.hyper_mix(streams, y, post, comb), rtol=1e-11, atol=1e-12)
    head = noise(seed + 4, n, n * d), noise(seed + 5, n), noise(seed + 6, 1)
    torch.testing.assert_close(
        torch_hyper.hyper_head(streams, *head, **EPS),
        ref.hyper_head(streams, *head, **EPS), rtol=1e-11, atol=1e-12,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_and_inputs_are_left_alone(dtype: torch.dtype, seed: int) -> None:
    streams, y = noise(seed, 3, 4, 16).to(dtype), noise(seed, 3, 16).to(dtype)
    args = tuple(a.float() for a in site(seed, 4, 16))
    before = [t.clone() for t in (streams, y, *args)]
    x, post, comb = torch_hyper.hyper_pre(streams, *args, **EPS, iters=20)
    assert x.dtype == dtype and {post.dtype, comb.dtype} == {torch.float32}
    kept = post.clone(), comb.clone()
    assert torch_hyper.hyper_mix(streams, y, post, comb).dtype == dtype
    head = args[0][:4], args[1][:4], args[2][:1]
    assert torch_hyper.hyper_head(streams, *head, **EPS).dtype == dtype
    for a, b in zip((streams, y, *args, post, comb), (*before, *kept), strict=True):
        assert torch.equal(a, b)


def test_pre_of_small_parameters_in_the_model_s_type(seed: int) -> None:
    """Norm weights may stay bfloat16."""
    streams = noise(seed, 3, 4, 16).bfloat16()
    args = [a.float() for a in site(seed, 4, 16)]
    args[3] = args[3].bfloat16()
    want = ref.hyper_pre(streams.double(), *(a.double() for a in args), **EPS, iters=20)
    got = torch_hyper.hyper_pre(streams, *args, **EPS, iters=20)
    torch.testing.assert_close(got[0].double(), want[0], rtol=2**-7, atol=2**-7)


def test_tokens_do_not_see_each_other(seed: int) -> None:
    streams, args = noise(seed, 3, 4, 16), site(seed, 4, 16)
    alone = torch_hyper.hyper_pre(streams[:1], *args, **EPS, iters=20)
    streams[1:] = float("nan")
    among = torch_hyper.hyper_pre(streams, *args, **EPS, iters=20)
    for a, b in zip(alone, among, strict=True):
        torch.testing.assert_close(a, b[:1], rtol=1e-12, atol=1e-13)
