"""Positions beyond a million: the model turns by the publisher's float32 table, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import v4
from harness import start
from torch import Tensor

from metainfer.core.request import SamplingParams
from metainfer.core.step import (
    NewRequest,
    PageGrant,
    Phase,
    RankTokens,
    Segment,
    StepPlan,
    TokenRun,
)
from metainfer.kv.book.spec import GroupKind
from metainfer.kv.store.entries import gather

MILLION = 1_048_576
FIRST = 1_000_000


def published(theta: float, yarn: dict[str, Any] | None, rotated: int, count: int) -> Tensor:
    """Angles [count, R / 2] from position `FIRST` on, as the inference code computes them: powers,
    blend and outer product in float32 (deepseek-v4.md 2.4)."""
    import math

    powers = torch.tensor([2 * i / rotated for i in range(rotated // 2)], dtype=torch.float32)
    each = 1.0 / (theta**powers)
    if yarn is not None:
        border = [
            rotated
            * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (yarn["beta_fast"], yarn["beta_slow"])
        ]
        low, high = max(math.floor(border[0]), 0), min(math.ceil(border[1]), rotated - 1)
        ramp = (torch.arange(rotated // 2, dtype=torch.float32) - low) / (high - low)
        smooth = 1 - ramp.clamp(0, 1)
        each = each / yarn["factor"] * (1 - smooth) + each * smooth
    return torch.outer(torch.arange(FIRST, FIRST + count).float(), each)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("far")
    v4.save(v4.tiny(11, max_position_embeddings=MILLION), folder)
    return start(
        folder,
        dtype="float32",
        chunk_tokens=64,
        concurrency=1,
        context=MILLION,
        layouts={"kv": "latent@1", "index": "index@1"},
    )


def test_tables_are_the_published_ones(engine: Any) -> None:
    model = engine._executor._parts.model
    for layer, theta, yarn in ((0, 1e4, None), (2, 1.6e5, v4.TINY["rope_parameters"])):
        angles = published(theta, yarn, 8, MILLION - FIRST)
        wanted = torch.cat((angles.cos(), angles.sin()), dim=1)
        table = model.layers[layer].cos_sin
        assert table.shape == (MILLION, 8)
        assert torch.equal(table[FIRST:], wanted)
        exact = torch.arange(FIRST, MILLION, dtype=torch.float64).unsqueeze(1)
        exact = exact * _wide_frequencies(theta, yarn)
        off = (angles.double() - exact).abs().max().item()
        print(f"layer {layer}: float32 angles are up to {off:.1e} radians from float64")
        assert 1e-5 < off < 0.1  # the recipe's own error, which a float64 table would not have


def _wide_frequencies(theta: float, yarn: dict[str, Any] | None) -> Tensor:
    from metainfer.ops.rope.spec import RopeSpec
    from metainfer.ops.rope.tables import frequencies

    scaling = {"rope_type": "yarn", "attention_factor": 1.0, **yarn} if yarn else {}
    return frequencies(RopeSpec(rotated=8, theta=theta, scaling=scaling), MILLION)[0]


def test_a_run_beyond_a_million_is_turned_by_it(engine: Any) -> None:
    """What the model stores there: the latent of each token, turned by the published angles."""
    executor, tokens = engine._executor, 32
    parts = executor._parts
    seen: list[Tensor] = []
    ops = parts.ops.phase(Phase.CHUNK)
    inner = ops.latent_qkv

    def recorded(q: Tensor, kv: Tensor, weight: Tensor, *rest: Any, **more: Any) -> Any:
        scale = torch.rsqrt(kv.square().mean(-1, keepdim=True) + more["eps"])
        seen.append(kv * scale * weight)
        return inner(q, kv, weight, *rest, **more)

    ops.latent_qkv = recorded
    run = TokenRun(0, FIRST, tuple(range(3, 3 + tokens)), 1, 0, True)
    new = NewRequest("far", 0, 0, (5,) * (FIRST + tokens), FIRST + tokens, 0, SamplingParams())
    pages = tuple(
        PageGrant(0, group.index, FIRST // group.page_tokens, (1, 2, 3))
        for group in parts.groups
        if group.kind is not GroupKind.STATE
    )
    segment = Segment(Phase.CHUNK, "single", (RankTokens((run,)),))
    executor.execute(StepPlan(0, (segment,), (new,), pages))
    assert len(seen) == 6
    for layer, latent in enumerate(seen):
        yarn = v4.TINY["rope_parameters"] if layer > 1 else None
        angles = published(1.6e5 if yarn else 1e4, yarn, 8, tokens)
        a, b = latent[:, -8::2], latent[:, -7::2]
        turned = torch.stack(
            (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1
        )
        wanted = torch.cat((latent[:, :-8], turned.flatten(1)), dim=1)
        view = parts.store.layers[layer]["local"]
        span = view.entries
        slots = torch.tensor([(1 + (p - FIRST // span * span) // span) * span + p % span
                              for p in range(FIRST, FIRST + tokens)])  # fmt: skip
        # Products of a turn may be fused; another angle would be off by 1e-4 at least.
        torch.testing.assert_close(gather(view, slots), wanted, rtol=1e-6, atol=1e-6)
