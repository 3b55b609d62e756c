"""Routing against `transformers`, against a sort in plain Python, and planted faults."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from deepseek_oracle import TIGHT, config, filled, lifted, noise, theirs
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from metainfer.ops.catalog import builtin_registry
from metainfer.ops.moe_route import ref
from metainfer.ops.moe_route.ref import moe_route, moe_route_hash
from metainfer.ops.qualify import qualify
from metainfer.platform.facts import DeviceFacts, Facts

HOST = Facts(platform="cpu", devices=(DeviceFacts(kind="cpu", name="cpu"),))


def by_expert(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the order of expert ids: transformers leaves the order open."""
    order = ids.long().argsort(dim=-1)
    return ids.long().gather(1, order), weights.gather(1, order)


def test_is_transformers_router(seed: int) -> None:
    # Logits below 20: above, their softplus leaves float64 (README).
    module = filled(theirs.DeepseekV4TopKRouter(config(n_routed_experts=24)), seed, 0.1)
    module.e_score_correction_bias.copy_(noise(seed + 1, 24))
    x = noise(seed, 40, 64)
    with lifted(), torch.no_grad():
        _, weights, ids = module(x)
    mine = moe_route(x, module.weight, module.e_score_correction_bias, top_k=2, scale=1.5)
    for a, b in zip(by_expert(*mine), by_expert(ids, weights), strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


def test_hash_is_transformers_hash_router(seed: int) -> None:
    module = filled(theirs.DeepseekV4HashRouter(config()), seed, 0.1)
    table = torch.stack([torch.randperm(8)[:2] for _ in range(256)])
    module.tid2eid.copy_(table)
    x, tokens = noise(seed, 40, 64), torch.arange(40) * 5
    with lifted(), torch.no_grad():
        _, weights, ids = module(x, tokens)
    mine = moe_route_hash(x, module.weight, table, tokens, scale=1.5)
    assert torch.equal(mine[0].long(), ids)
    torch.testing.assert_close(mine[1], weights, **TIGHT)


@given(st.data())
def test_choice_by_sorting_in_python(data: st.DataObject) -> None:
    """Scores from a small set, so that ties are everywhere; biases of both signs."""
    e = data.draw(st.integers(1, 9))
    k = data.draw(st.integers(1, e))
    logits = data.draw(
        st.lists(st.sampled_from([-30.0, -1.0, 0.0, 2.0, 25.0]), min_size=e, max_size=e)
    )
    bias = data.draw(st.lists(st.sampled_from([-7.0, 0.0, 0.5]), min_size=e, max_size=e))
    x = torch.ones(1, 1, dtype=torch.float64)
    gate = torch.tensor(logits, dtype=torch.float64).unsqueeze(1)
    ids, weights = moe_route(x, gate, torch.tensor(bias), top_k=k, scale=1.5)
    s = [math.sqrt(max(v, 0) + math.log1p(math.exp(-abs(v)))) for v in logits]
    want = sorted(range(e), key=lambda i: (-(s[i] + bias[i]), i))[:k]
    assert ids[0].tolist() == want
    total = sum(s[i] for i in want)
    assert weights[0].tolist() == pytest.approx([1.5 * s[i] / total for i in want], rel=1e-12)


def test_weights_sum_to_the_scale_and_underflow_gives_zero(seed: int) -> None:
    x, gate = noise(seed, 7, 16), noise(seed + 1, 9, 16)
    _, weights = moe_route(x, gate, torch.zeros(9), top_k=4, scale=1.5)
    torch.testing.assert_close(weights.sum(-1), torch.full((7,), 1.5).double(), **TIGHT)
    cold = torch.full((9, 16), -100.0)
    _, weights = moe_route(torch.ones(2, 16), cold, torch.zeros(9), top_k=4, scale=1.5)
    assert torch.equal(weights, torch.zeros(2, 4))


def test_a_row_is_routed_alike_in_any_company(seed: int) -> None:
    x, gate, bias = noise(seed, 6, 16), noise(seed + 1, 9, 16), noise(seed + 2, 9)
    x[4] = 0
    alone = [moe_route(x[t : t + 1], gate, bias * 0, top_k=3, scale=1.5)[0] for t in range(6)]
    assert torch.equal(torch.cat(alone), moe_route(x, gate, bias * 0, top_k=3, scale=1.5)[0])
    assert alone[4].tolist() == [[0, 1, 2]]


# ---- planted faults: qualification judges chosen experts exactly, weights in float32 -------------


def last_tie(x: Tensor, gate: Tensor, bias: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    ids, weights = moe_route(x, gate.flip(0), bias.flip(0), **kwargs)
    return (gate.shape[0] - 1 - ids).int(), weights


def bias_in_weights(
    x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    ids, _ = moe_route(x, gate, bias, top_k=top_k, scale=scale)
    chosen = (ref.scores(x, gate) + bias).gather(1, ids.long())
    return ids, chosen / chosen.sum(-1, keepdim=True) * scale


def rounded_weights(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    ids, weights = moe_route(x, *args, **kwargs)
    return ids, weights.to(x.dtype)


def long_ids(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    ids, weights = moe_route(*args, **kwargs)
    return ids.long(), weights


@pytest.mark.parametrize("fault", [last_tie, bias_in_weights, rounded_weights, long_ids])
def test_planted_faults_are_refused(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PLANTED", fault, raising=False)
    registry = builtin_registry()
    plain = next(impl for impl in registry.of("moe_route") if impl.provider == "reference")
    impl = dataclasses.replace(plain, load=f"{__name__}:PLANTED")
    verdict = qualify(impl, "bfloat16", "cpu", HOST, registry)
    assert {reason.code for reason in verdict.reasons} <= {"error", "result"}
    assert not verdict.accepted
