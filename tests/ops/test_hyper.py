"""Hyper-connections against `transformers` and against loops written out."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from deepseek_oracle import TIGHT, config, filled, lifted, noise, theirs
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from metainfer.core.step import Phase
from metainfer.kernels.choice import Choice, Policy
from metainfer.kernels.impl import Evidence, OpRequest
from metainfer.kernels.select_op import select_op
from metainfer.ops.catalog import builtin_registry
from metainfer.ops.hyper.ref import hyper_collapse, hyper_head, hyper_mix, hyper_triplet, sinkhorn
from metainfer.platform.machine_catalog import find_machine

EPS = {"norm_eps": 1e-6, "eps": 1e-6}


def test_site_is_transformers_hyper_connection(seed: int) -> None:
    module = filled(theirs.DeepseekV4HyperConnection(config()), seed)
    streams = noise(seed, 9, 4, 64)
    with lifted(), torch.no_grad():
        post, comb, collapsed = module(streams[None])
    ours = hyper_triplet(streams, module.fn, module.base, module.scale, **EPS, iters=20)
    torch.testing.assert_close(ours[1], post[0], **TIGHT)
    torch.testing.assert_close(ours[2], comb[0], **TIGHT)
    torch.testing.assert_close(hyper_collapse(streams, ours[0]), collapsed[0], **TIGHT)


def test_mix_by_hand(seed: int) -> None:
    """``R'_i = post_i y + sum_j C[j, i] R_j``, one number at a time."""
    streams, y = noise(seed, 5, 4, 64), noise(seed + 1, 5, 64)
    post, comb = noise(seed + 2, 5, 4), noise(seed + 3, 5, 4, 4)
    want = torch.empty_like(streams)
    for t in range(5):
        for i in range(4):
            want[t, i] = post[t, i] * y[t] + sum(comb[t, j, i] * streams[t, j] for j in range(4))
    torch.testing.assert_close(hyper_mix(streams, y, post, comb), want, **TIGHT)


def test_head_is_transformers_hyper_head(seed: int) -> None:
    module = filled(theirs.DeepseekV4HyperHead(config()), seed)
    streams = noise(seed, 9, 4, 64)
    with lifted(), torch.no_grad():
        want = module(streams[None])[0]
    got = hyper_head(streams, module.hc_fn, module.hc_base, module.hc_scale, **EPS)
    torch.testing.assert_close(got, want, **TIGHT)


def by_hand(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float
) -> tuple[list[float], list[float], list[list[float]]]:
    """One token in plain Python, section 2.2 of the model's description line by line."""
    n = streams.shape[0]
    r = streams.flatten().tolist()
    rstd = 1 / math.sqrt(sum(v * v for v in r) / len(r) + 1e-6)
    m = [sum(a * b for a, b in zip(row, r, strict=True)) * rstd for row in fn.tolist()]
    s, b = scale.tolist(), base.tolist()
    pre = [1 / (1 + math.exp(-(m[k] * s[0] + b[k]))) + eps for k in range(n)]
    post = [2 / (1 + math.exp(-(m[n + i] * s[1] + b[n + i]))) for i in range(n)]
    c = []
    for j in range(n):
        e = [math.exp(m[2 * n + n * j + k] * s[2] + b[2 * n + n * j + k]) for k in range(n)]
        c.append([v / sum(e) + eps for v in e])
    for step in range(2 * iters - 1):
        if step % 2 == 0:
            sums = [sum(c[j][k] for j in range(n)) + eps for k in range(n)]
            c = [[c[j][k] / sums[k] for k in range(n)] for j in range(n)]
        else:
            c = [[v / (sum(row) + eps) for v in row] for row in c]
    return pre, post, c


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 20), st.integers(0, 2**20))
def test_triplet_by_hand(n: int, d: int, iters: int, seed: int) -> None:
    streams, fn = noise(seed, 1, n, d), noise(seed + 1, (n + 2) * n, n * d)
    base, scale = noise(seed + 2, (n + 2) * n), noise(seed + 3, 3)
    got = hyper_triplet(streams, fn, base, scale, norm_eps=1e-6, eps=1e-3, iters=iters)
    want = by_hand(streams[0], fn, base, scale, iters, 1e-3)
    for mine, theirs_ in zip(got, want, strict=True):
        expected = torch.tensor(theirs_, dtype=torch.float64)
        torch.testing.assert_close(mine[0], expected, rtol=1e-10, atol=1e-13)


def test_columns_sum_to_one_and_rows_nearly(seed: int) -> None:
    comb = sinkhorn(torch.softmax(noise(seed, 50, 4, 4), -1) + 1e-6, 1e-6, 20)
    assert (comb.sum(-2) - 1).abs().max() < 2e-6
    rows = (comb.sum(-1) - 1).abs().max()
    assert 1e-9 < rows < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_stay_wide_and_streams_keep_their_type(dtype: torch.dtype, seed: int) -> None:
    streams = noise(seed, 3, 4, 16).to(dtype)
    fn, base, scale = (noise(seed, *s).float() for s in ((24, 64), (24,), (3,)))
    pre, post, comb = hyper_triplet(streams, fn, base, scale, **EPS, iters=20)
    assert {t.dtype for t in (pre, post, comb)} == {torch.float32}
    assert hyper_collapse(streams, pre).dtype == dtype
    assert hyper_mix(streams, streams[:, 0], post, comb).dtype == dtype


def test_zero_rows_and_rows_of_zeros(seed: int) -> None:
    fn, base, scale = (noise(seed, *s) for s in ((24, 64), (24,), (3,)))
    for rows in (0, 2):
        streams = torch.zeros(rows, 4, 16, dtype=torch.float64)
        pre, post, comb = hyper_triplet(streams, fn, base, scale, **EPS, iters=20)
        assert comb.shape == (rows, 4, 4) and comb.isfinite().all() and post.isfinite().all()
        torch.testing.assert_close(pre, (torch.sigmoid(base[:4]) + 1e-6).expand(rows, 4), **TIGHT)


def test_tokens_do_not_see_each_other(seed: int) -> None:
    streams = noise(seed, 3, 4, 16)
    fn, base, scale = (noise(seed, *s) for s in ((24, 64), (24,), (3,)))
    alone = hyper_triplet(streams[:1], fn, base, scale, **EPS, iters=20)
    streams[1:] = float("nan")
    among = hyper_triplet(streams, fn, base, scale, **EPS, iters=20)
    for a, b in zip(alone, among, strict=True):
        torch.testing.assert_close(a, b[:1], **TIGHT)


@pytest.mark.parametrize("machine", ["1x-h200", "8x-rtx-pro-6000d", "8x-l20", "8x-a800-pcie"])
@pytest.mark.parametrize("op", ["hyper_pre", "hyper_mix_pre", "hyper_mix", "hyper_head"])
def test_cards_take_few_launches_at_every_size(machine: str, op: str) -> None:
    """The block that enters the streams is an op of its own, once a step: it has the same kernel
    as the steps between, and only failed cases keep a card from it."""
    registry = builtin_registry()
    facts = dataclasses.replace(find_machine(machine).facts, software={"triton": "3.6.0"})
    for phase, rows in ((Phase.DECODE, 1), (Phase.DECODE, 128), (Phase.CHUNK, 8192)):
        shape = {"rows": rows, "n": 4, "d": 4096}
        request = OpRequest(op, op, phase, "bfloat16", shape, frozenset(), ())
        found = select_op(registry, request, facts, {}, Policy(min_evidence=Evidence.NONE))
        assert isinstance(found, Choice) and found.impl.name == "triton"
        torch_form = next(loser for loser in found.rejected if loser.impl == "torch")
        assert [reason.code for reason in torch_form.reasons] == ["slower"]
        failed = Policy(min_evidence=Evidence.NONE, disproven={f"{op}/triton": ("a case",)})
        fallen = select_op(registry, request, facts, {}, failed)
        assert isinstance(fallen, Choice) and fallen.slowdown is not None and fallen.slowdown > 1.5
        assert any(r.code == "disproven" for lost in fallen.rejected for r in lost.reasons)
