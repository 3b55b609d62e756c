"""Hyper-connections in few launches: Sinkhorn runs in place, two launches a step.

The N by N weights of all tokens lie as [N N, T]; a product with a matrix of ones and zeros gives
every element the sum that it is divided by. Collapse and mix are small batched products.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.common import wide


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
    """See `ref.hyper_pre`; x is rounded once, after its norm."""
    r, n = wide(streams), streams.shape[1]
    kinds, columns, rows = _constants(n, r.dtype, r.device)
    m = _project(r, fn, norm_eps)  # [T, (N + 2) N]
    m = torch.addcmul(base.to(r.dtype), m, scale.to(r.dtype)[kinds])
    post = torch.sigmoid(m[:, n : 2 * n]).mul_(2)  # [T, N]
    comb = torch.softmax(m[:, 2 * n :].reshape(-1, n, n), dim=-1).add_(eps)
    flat = comb.flatten(1).T.contiguous()  # [N N, T]
    floor = torch.full_like(flat[:1], eps)
    sums = torch.empty_like(flat)
    for step in range(2 * iters - 1):
        torch.addmm(floor, rows if step % 2 else columns, flat, out=sums)
        flat.div_(sums)
    x = _collapse(r, torch.sigmoid(m[:, :n]).add_(eps))
    x = F.rms_norm(x, (x.shape[1],), norm_weight.to(x.dtype), norm_eps)
    return x.to(streams.dtype), post, flat.T.contiguous().view(-1, n, n)


def hyper_mix(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `ref.hyper_mix`."""
    r = wide(streams)
    new = post.to(r.dtype).unsqueeze(-1) * wide(y).unsqueeze(1)  # [T, N, D]
    return new.baddbmm_(comb.to(r.dtype).transpose(1, 2), r).to(streams.dtype)


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
    """See `ref.hyper_mix_pre`: one after the other."""
    mixed = hyper_mix(streams, y, post, comb)
    more = hyper_pre(mixed, fn, base, scale, norm_weight, norm_eps=norm_eps, eps=eps, iters=iters)
    return (mixed, *more)


def hyper_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, eps: float
) -> Tensor:
    """See `ref.hyper_head`."""
    r = wide(streams)
    m = torch.addcmul(base.to(r.dtype), _project(r, fn, norm_eps), scale.to(r.dtype))
    return _collapse(r, torch.sigmoid(m).add_(eps)).to(streams.dtype)


def _project(r: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    flat = r.flatten(1)
    norm = torch.linalg.vector_norm(flat, dim=-1, keepdim=True)
    rstd = norm.square_().div_(flat.shape[1]).add_(norm_eps).rsqrt_()
    return (flat @ fn.to(r.dtype).T).mul_(rstd)


def _collapse(r: Tensor, pre: Tensor) -> Tensor:
    return torch.bmm(pre.unsqueeze(1), r).squeeze(1)


@lru_cache(maxsize=16)
def _constants(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Which scale each number of a site takes [(N + 2) N], and what sums columns and rows of an
    N by N matrix laid flat: [N N, N N] of ones and zeros."""
    kinds = torch.tensor([0] * n + [1] * n + [2] * n * n)
    at = torch.arange(n * n)
    columns = at % n == at.unsqueeze(1) % n
    rows = at // n == at.unsqueeze(1) // n
    return kinds.to(device), columns.to(device, dtype), rows.to(device, dtype)
