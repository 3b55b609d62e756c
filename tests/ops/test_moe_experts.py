"""Experts against `transformers` and against one token and one expert at a time."""

from __future__ import annotations

import math

import pytest
import torch
from deepseek_oracle import TIGHT, config, filled, lifted, noise, packed, theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metainfer.ops.activation.ref import swiglu_clamp
from metainfer.ops.linear.ref import linear
from metainfer.ops.moe_experts.ref import moe_experts


def routing(seed: int, rows: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    picks = [torch.randperm(experts, generator=g)[:k] for _ in range(rows)]
    ids = torch.stack(picks).int() if picks else torch.empty(0, k, dtype=torch.int32)
    return ids, torch.softmax(noise(seed + 1, rows, k), -1) * 1.5


@pytest.mark.parametrize("limit", [10.0, 0.5])
def test_is_transformers_experts(limit: float, seed: int) -> None:
    """They weigh after w2, we before it: equal in float64, to its rounding."""
    module = filled(theirs.DeepseekV4Experts(config(swiglu_limit=limit)), seed)
    module.config._experts_implementation = "eager"
    x = noise(seed, 21, 64) * 4
    ids, weights = routing(seed, 21, 8, 2)
    with lifted(), torch.no_grad():
        want = module(x, ids.long(), weights)
    got = moe_experts(
        x, ids, weights, packed(module.gate_up_proj), packed(module.down_proj), limit=limit
    )
    torch.testing.assert_close(got, want, **TIGHT)


def test_shared_is_transformers_shared_expert_when_clamped(seed: int) -> None:
    module = filled(theirs.DeepseekV4MLP(config(swiglu_limit=0.5)), seed)
    x = noise(seed, 7, 64) * 4
    with lifted(), torch.no_grad():
        want = module(x)
    w13, w2 = torch.cat((module.gate_proj.weight, module.up_proj.weight)), module.down_proj.weight

    def shared(limit: float) -> Tensor:
        return linear(swiglu_clamp(linear(x, packed(w13)), limit), packed(w2))

    torch.testing.assert_close(shared(0.5), want, **TIGHT)
    assert (shared(0.0) - want).abs().max() > 0.1


def hidden(x: Tensor, w13: Tensor, limit: float) -> list[float]:
    """One token, one expert, plain Python."""
    half = w13.shape[0] // 2
    product = [sum(a * b for a, b in zip(row, x.tolist(), strict=True)) for row in w13.tolist()]
    found = []
    for gate, up in zip(product[:half], product[half:], strict=True):
        if limit:
            gate, up = min(gate, limit), max(-limit, min(up, limit))
        found.append(gate / (1 + math.exp(-gate)) * up)
    return found


@settings(max_examples=40)
@given(
    st.integers(0, 4), st.integers(1, 5), st.integers(1, 6), st.integers(1, 5),
    st.sampled_from([0.0, 0.3, 10.0]), st.integers(0, 2**20), st.data(),
)  # fmt: skip
def test_by_hand(
    rows: int, experts: int, d: int, f: int, limit: float, seed: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, experts))
    x = noise(seed, rows, d) * 2
    w13, w2 = noise(seed + 1, experts, 2 * f, d), noise(seed + 2, experts, d, f)
    ids, weights = routing(seed, rows, experts, k)
    ids[noise(seed + 3, rows, k) > 1] = -1
    want = torch.zeros(rows, d, dtype=torch.float64)
    for t in range(rows):
        for e, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if e >= 0:
                h = [weight * v for v in hidden(x[t], w13[e], limit)]
                want[t] += w2[e] @ torch.tensor(h, dtype=torch.float64)
    got = moe_experts(x, ids, weights, packed(w13), packed(w2), limit=limit)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    shared = swiglu_clamp(linear(x, packed(w13[0])), limit)
    for t in range(rows):
        h = torch.tensor(hidden(x[t], w13[0], limit), dtype=torch.float64)
        torch.testing.assert_close(shared[t], h, rtol=1e-10, atol=1e-12)


def test_the_gate_has_no_lower_clamp() -> None:
    """silu(-20) is not silu(-1)."""
    got = swiglu_clamp(torch.tensor([[-20.0, -20.0]], dtype=torch.float64), 1.0)
    assert got.item() == pytest.approx(20 / (1 + math.exp(20)), rel=1e-12)


def test_experts_without_tokens_are_not_read_and_padded_rows_are_zero(
    seed: int, poison: None
) -> None:
    x = noise(seed, 3, 8)
    x[2] = float("nan")  # a padded row
    w13, w2 = noise(seed + 1, 5, 6, 8), noise(seed + 2, 5, 8, 3)
    w13[[0, 3]], w2[[0, 3]] = float("nan"), float("nan")
    ids = torch.tensor([[1, 4], [2, 1], [-1, -1]], dtype=torch.int32)
    got = moe_experts(x, ids, torch.ones(3, 2), packed(w13), packed(w2), limit=10.0)
    assert got[:2].isfinite().all() and torch.equal(got[2], torch.zeros(8).double())
