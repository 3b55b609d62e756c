"""DeepSeek-V4's draft layer written out for one sequence, without a cache and without our ops.

deepseek-v4.md 2.8 over 2.2 (streams), 2.3 (attention) and 2.7 (experts), in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class PlainMtp:
    """`tensors` by the publisher's names; `table` [M, R] cosines then sines."""

    def __init__(self, tensors: Mapping[str, Tensor], arch: Any, table: Tensor) -> None:
        self.w = {name: data.double() for name, data in tensors.items()}
        self.arch, self.table = arch, table.double()

    def guesses(self, ids: list[int], streams: Tensor) -> list[int]:
        """The guess behind each token but the last; streams [T, N, D] as the model left them."""
        rows = len(ids) - 1
        word = self.norm(self.w["embed.weight"][torch.tensor(ids[1:])], self.mtp("enorm.weight"))
        r = self.norm(streams[:rows], self.mtp("hnorm.weight")) @ self.mtp("h_proj.weight").T
        r = r + (word @ self.mtp("e_proj.weight").T).unsqueeze(1)
        for part, block in (("attn", self.attention), ("ffn", self.experts)):
            x, post, c = self.site(part, r)
            y = block(self.norm(x, self.mtp(f"{part}_norm.weight")))
            r = post.unsqueeze(-1) * y.unsqueeze(1) + c.transpose(1, 2) @ r
        m = self.flat(r) @ self.mtp("hc_head_fn").T * self.mtp("hc_head_scale")
        pre = torch.sigmoid(m + self.mtp("hc_head_base")) + self.arch.hyper_eps
        h = self.norm((pre.unsqueeze(-1) * r).sum(1), self.mtp("norm.weight"))
        return (h @ self.w["head.weight"].T).argmax(-1).tolist()

    def mtp(self, name: str) -> Tensor:
        return self.w[f"mtp.0.{name}"]

    def norm(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.arch.norm_eps)
        return x if weight is None else x * weight

    def flat(self, r: Tensor) -> Tensor:
        """The streams of a token in a row, over their root mean square."""
        return self.norm(r.flatten(1))

    def site(self, part: str, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, eps = self.arch.streams, self.arch.hyper_eps
        m = self.flat(r) @ self.mtp(f"hc_{part}_fn").T
        s, b = self.mtp(f"hc_{part}_scale"), self.mtp(f"hc_{part}_base")
        pre = torch.sigmoid(m[:, :n] * s[0] + b[:n]) + eps
        post = 2 * torch.sigmoid(m[:, n : 2 * n] * s[1] + b[n : 2 * n])
        c = (m[:, 2 * n :] * s[2] + b[2 * n :]).view(-1, n, n).softmax(-1) + eps
        c = c / (c.sum(1, keepdim=True) + eps)
        for _ in range(self.arch.sinkhorn_iters - 1):
            c = c / (c.sum(2, keepdim=True) + eps)
            c = c / (c.sum(1, keepdim=True) + eps)
        return (pre.unsqueeze(-1) * r).sum(1), post, c

    def turn(self, x: Tensor, sign: float) -> Tensor:
        rotated = self.arch.rope_dim
        cos, sin = self.table[: x.shape[0]].chunk(2, -1)
        if x.dim() == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        a, b, sin = x[..., -rotated::2], x[..., -rotated + 1 :: 2], sign * sin
        tail = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        return torch.cat((x[..., :-rotated], tail), -1)

    def attention(self, x: Tensor) -> Tensor:
        arch, rows = self.arch, x.shape[0]
        qr = self.norm(x @ self.mtp("attn.wq_a.weight").T, self.mtp("attn.q_norm.weight"))
        q = (qr @ self.mtp("attn.wq_b.weight").T).view(rows, arch.heads, arch.head_dim)
        q = self.turn(self.norm(q), 1)
        kv = self.norm(x @ self.mtp("attn.wkv.weight").T, self.mtp("attn.kv_norm.weight"))
        kv = self.turn(kv, 1)
        logits = torch.einsum("thd,sd->ths", q, kv) * arch.scale
        at = torch.arange(rows)
        key, query = at.unsqueeze(0), at.unsqueeze(1)
        unseen = (key > query) | (key <= query - arch.window)
        logits = logits.masked_fill(unseen.unsqueeze(1), float("-inf"))
        sink = self.mtp("attn.attn_sink").view(1, -1, 1).expand(rows, -1, 1)
        p = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
        o = self.turn(torch.einsum("ths,sd->thd", p, kv), -1).reshape(rows, arch.o_groups, -1)
        wo = self.mtp("attn.wo_a.weight").view(arch.o_groups, arch.o_rank, -1)
        return torch.einsum("tgk,grk->tgr", o, wo).flatten(1) @ self.mtp("attn.wo_b.weight").T

    def experts(self, x: Tensor) -> Tensor:
        arch = self.arch
        score = torch.log1p((x @ self.mtp("ffn.gate.weight").T).exp()).sqrt()
        best = (score + self.mtp("ffn.gate.bias")).topk(arch.experts_per_token, -1).indices
        share = score.gather(1, best)
        share = share / share.sum(-1, keepdim=True) * arch.routed_scale
        y = self.expert("ffn.shared_experts", x)
        for t in range(x.shape[0]):
            for k, number in enumerate(best[t].tolist()):
                y[t] += share[t, k] * self.expert(f"ffn.experts.{number}", x[t])
        return y

    def expert(self, name: str, x: Tensor) -> Tensor:
        gate, up = (x @ self.mtp(f"{name}.{leaf}.weight").T for leaf in ("w1", "w3"))
        limit = self.arch.limit
        hidden = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        return hidden @ self.mtp(f"{name}.w2.weight").T
