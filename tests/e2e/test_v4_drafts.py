"""DeepSeek-V4's own draft layer (MTP): no token changes, and its guesses are the formula's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import v4
from harness import ask, start
from test_invariance import same
from torch import Tensor

from metainfer.core.errors import RefusedError
from metainfer.core.request import SamplingParams
from metainfer.engine.engine import Engine

PLAIN = {"kv": "latent@1", "index": "index@1"}
FIXED: Mapping[str, Any] = {
    "dtype": "float64",
    "context": 192,
    "layouts": PLAIN,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("mtp")
    return folder, v4.save_with_mtp(v4.tiny(31), folder, seed=5)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    stem = [rng.randrange(3, 256) for _ in range(40)]
    return [
        stem[: rng.randrange(41)] + [rng.randrange(3, 256) for _ in range(rng.randrange(1, 40))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_drafts_change_no_token(checkpoint: tuple[Path, Any], depth: int) -> None:
    rng = random.Random(depth)
    folder, _ = checkpoint
    asked = prompts(rng, 6)
    params = [
        SamplingParams(
            temperature=rng.choice((0.0, 0.8)), seed=i, max_tokens=rng.randrange(1, 60), logprobs=0
        )
        for i in range(len(asked))
    ]
    plain = ask(start(folder, concurrency=3, chunk_tokens=32, **FIXED), asked, params)
    drafting = start(folder, concurrency=3, chunk_tokens=32, draft=f"mtp:{depth}", **FIXED)
    for answer, wanted in zip(ask(drafting, asked, params), plain, strict=True):
        same(answer, wanted)
    stats = drafting.stats()
    assert stats.drafted_tokens > 50


def test_guesses_are_the_formulas(checkpoint: tuple[Path, dict[str, Tensor]]) -> None:
    """Each guess of the engine, incremental over its cache, against section 2.8 in one pass."""
    folder, tensors = checkpoint
    engine = start(folder, concurrency=1, chunk_tokens=16, draft="mtp:1", **FIXED)
    seen, drafter = [], engine._executor._parts.model_drafts  # type: ignore[union-attr]
    propose = drafter.propose

    def recorded(step: Any) -> Any:
        made = propose(step)
        ends = [int(row) for row in step.last_rows]
        for guesses, row, count in zip(made, ends, step.wanted, strict=True):
            if count:
                seen.append((int(step.inputs.positions[row]), guesses[0]))
        return made

    drafter.propose = recorded
    prompt = prompts(random.Random(9), 1)[0]
    (answer,) = ask(engine, [prompt], SamplingParams(temperature=0.0, max_tokens=30))
    whole = prompt + answer.tokens
    streams = _streams(engine, whole)
    wanted = _plain_guesses({k: v.double() for k, v in tensors.items()}, whole, streams, engine)
    assert len(seen) > 10
    for position, guess in seen:
        assert guess == wanted[position], position


def _streams(engine: Engine, ids: list[int]) -> Tensor:
    """The model's streams [T, N, D] for every token, from a run of its own."""
    parts = engine._executor._parts  # type: ignore[union-attr]
    kept: list[Tensor] = []
    forward = parts.model.forward

    def keep(*args: Any) -> Any:
        hidden = forward(*args)
        kept.append(hidden.streams)
        return hidden

    parts.model.forward = keep
    ask(engine, [ids], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    parts.model.forward = forward
    return torch.cat(kept)[: len(ids)]


def _plain_guesses(
    w: Mapping[str, Tensor], ids: list[int], streams: Tensor, engine: Engine
) -> list[int]:
    """Section 2.8 over 2.2, 2.3 and 2.7, written out for one sequence without a cache."""
    arch = engine.resolved.arch  # type: ignore[union-attr]
    eps, n, d = arch.norm_eps, arch.streams, arch.head_dim
    table = engine._executor._parts.model.tables[0].double()  # type: ignore[union-attr]

    def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x if weight is None else x * weight

    def mtp(name: str) -> Tensor:
        return w[f"mtp.0.{name}"]

    def turn(x: Tensor, sign: float) -> Tensor:
        cos, sin = table[: x.shape[0]].chunk(2, -1)
        if x.dim() == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        a, b = x[..., -arch.rope_dim :: 2], x[..., -arch.rope_dim + 1 :: 2]
        sin = sign * sin
        tail = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        return torch.cat((x[..., : -arch.rope_dim], tail), -1)

    def site(part: str, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = r.flatten(1)
        m = (flat @ mtp(f"hc_{part}_fn").T) * torch.rsqrt(
            flat.square().mean(-1, keepdim=True) + eps
        )
        s, b = mtp(f"hc_{part}_scale"), mtp(f"hc_{part}_base")
        pre = torch.sigmoid(m[:, :n] * s[0] + b[:n]) + arch.hyper_eps
        post = 2 * torch.sigmoid(m[:, n : 2 * n] * s[1] + b[n : 2 * n])
        c = (m[:, 2 * n :] * s[2] + b[2 * n :]).view(-1, n, n).softmax(-1) + arch.hyper_eps
        c = c / (c.sum(1, keepdim=True) + arch.hyper_eps)
        for _ in range(arch.sinkhorn_iters - 1):
            c = c / (c.sum(2, keepdim=True) + arch.hyper_eps)
            c = c / (c.sum(1, keepdim=True) + arch.hyper_eps)
        return (pre.unsqueeze(-1) * r).sum(1), post, c

    def mix(r: Tensor, y: Tensor, post: Tensor, c: Tensor) -> Tensor:
        return post.unsqueeze(-1) * y.unsqueeze(1) + c.transpose(1, 2) @ r

    rows = len(ids) - 1
    word = norm(w["embed.weight"][torch.tensor(ids[1:])], mtp("enorm.weight"))
    r = norm(streams[:rows], mtp("hnorm.weight")) @ mtp("h_proj.weight").T
    r = r + (word @ mtp("e_proj.weight").T).unsqueeze(1)
    x, post, c = site("attn", r)
    x = norm(x, mtp("attn_norm.weight"))
    q = norm(x @ mtp("attn.wq_a.weight").T, mtp("attn.q_norm.weight")) @ mtp("attn.wq_b.weight").T
    q = turn(norm(q.view(rows, arch.heads, d)), 1)
    kv = turn(norm(x @ mtp("attn.wkv.weight").T, mtp("attn.kv_norm.weight")), 1)
    logits = torch.einsum("thd,sd->ths", q, kv) * arch.scale
    at = torch.arange(rows)
    far = (at.unsqueeze(0) > at.unsqueeze(1)) | (at.unsqueeze(0) <= at.unsqueeze(1) - arch.window)
    logits = logits.masked_fill(far.unsqueeze(1), float("-inf"))
    sink = mtp("attn.attn_sink").view(1, -1, 1).expand(rows, -1, 1)
    p = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
    o = turn(torch.einsum("ths,sd->thd", p, kv), -1).reshape(rows, arch.o_groups, -1)
    wo = mtp("attn.wo_a.weight").view(arch.o_groups, arch.o_rank, -1)
    y = torch.einsum("tgk,grk->tgr", o, wo).flatten(1) @ mtp("attn.wo_b.weight").T
    r = mix(r, y, post, c)
    x, post, c = site("ffn", r)
    x = norm(x, mtp("ffn_norm.weight"))
    score = torch.log1p((x @ mtp("ffn.gate.weight").T).exp()).sqrt()
    best = (score + mtp("ffn.gate.bias")).topk(arch.experts_per_token, -1).indices
    share = score.gather(1, best)
    share = share / share.sum(-1, keepdim=True) * arch.routed_scale

    def expert(name: str, x: Tensor) -> Tensor:
        gate, up = (x @ mtp(f"{name}.{leaf}.weight").T for leaf in ("w1", "w3"))
        hidden = torch.nn.functional.silu(gate.clamp(max=arch.limit))
        return (hidden * up.clamp(-arch.limit, arch.limit)) @ mtp(f"{name}.w2.weight").T

    y = expert("ffn.shared_experts", x)
    for t in range(rows):
        for k in range(arch.experts_per_token):
            y[t] += share[t, k] * expert(f"ffn.experts.{int(best[t, k])}", x[t])
    r = mix(r, y, post, c)
    flat = r.flatten(1)
    m = (flat @ mtp("hc_head_fn").T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    pre = torch.sigmoid(m * mtp("hc_head_scale") + mtp("hc_head_base")) + arch.hyper_eps
    h = norm((pre.unsqueeze(-1) * r).sum(1), mtp("norm.weight"))
    return (h @ w["head.weight"].T).argmax(-1).tolist()


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    v4.save(v4.tiny(1), tmp_path)
    with pytest.raises(RefusedError, match="no draft module"):
        start(tmp_path, draft="mtp", **FIXED)
