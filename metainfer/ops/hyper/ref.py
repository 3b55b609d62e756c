"""Hyper-connections: weights from the streams, collapse before a block, mix after it."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.common import wide
from metainfer.ops.norm.ref import rmsnorm


def hyper_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """All that stands before a block: x [T, D] collapsed and normed, post [T, N], comb [T, N, N].

    `norm_weight` [D] is float32; `norm_eps` serves both norms. The rest as in `hyper_triplet`.
    """
    pre, post, comb = hyper_triplet(
        streams, fn, base, scale, norm_eps=norm_eps, eps=eps, iters=iters
    )
    return rmsnorm(hyper_collapse(streams, pre), norm_weight, norm_eps), post, comb


def hyper_triplet(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of one site: pre [T, N], post [T, N], comb [T, N, N], float32 (or float64).

    streams [T, N, D]; fn [(N + 2) N, N D], base [(N + 2) N], scale [3] in float32. `iters` Sinkhorn
    iterations; the first is the softmax over comb's columns followed by the column sums' step.
    """
    n = streams.shape[1]
    m = _project(streams, fn, norm_eps)
    s, b = scale.to(m.dtype), base.to(m.dtype)
    pre = torch.sigmoid(m[:, :n] * s[0] + b[:n]) + eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * s[1] + b[n : 2 * n])
    logits = m[:, 2 * n :] * s[2] + b[2 * n :]
    logits = logits.reshape(-1, n, n)  # [T, N (j), N (k)]
    return pre, post, sinkhorn(torch.softmax(logits, dim=-1) + eps, eps, iters)


def sinkhorn(comb: Tensor, eps: float, iters: int) -> Tensor:
    """Normalise columns and rows of positive [T, N, N] in turn; columns come first and last."""
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def hyper_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """``x = sum_k pre_k R_k``: streams [T, N, D], pre [T, N] -> [T, D] in the streams' dtype."""
    r = wide(streams)
    return (pre.to(r.dtype).unsqueeze(-1) * r).sum(dim=1).to(streams.dtype)


def hyper_mix(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``R'_i = post_i y + sum_j C[j, i] R_j``: [T, N, D] from a block's output y [T, D]."""
    r = wide(streams)
    new = post.to(r.dtype).unsqueeze(-1) * wide(y).unsqueeze(1)
    return (new + comb.to(r.dtype).transpose(1, 2) @ r).to(streams.dtype)


def hyper_mix_pre(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`hyper_mix` of one block, then `hyper_pre` of the next: the mixed streams [T, N, D], which
    the next site sees as rounded, and its x, post and comb."""
    mixed = hyper_mix(streams, y, post, comb)
    more = hyper_pre(mixed, fn, base, scale, norm_weight, norm_eps=norm_eps, eps=eps, iters=iters)
    return (mixed, *more)


def hyper_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, eps: float
) -> Tensor:
    """The collapse before the final norm: fn [N, N D], base [N], scale [1] -> [T, D]."""
    m = _project(streams, fn, norm_eps)
    return hyper_collapse(streams, torch.sigmoid(m * scale.to(m.dtype) + base.to(m.dtype)) + eps)


def _project(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """``(fn . r) / sqrt(mean(r^2) + norm_eps)`` of the flattened streams: [T, rows of fn]."""
    r = wide(streams).flatten(1)
    return r @ fn.to(r.dtype).T * torch.rsqrt(r.square().mean(-1, keepdim=True) + norm_eps)
