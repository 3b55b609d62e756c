"""Cases of the hyper-connection ops: odd widths, no rows, zero rows, saturated and flat weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metainfer.ops.case import Case, generator, normal
from metainfer.ops.common import wide
from metainfer.ops.hyper.ref import (
    hyper_collapse,
    hyper_head,
    hyper_mix,
    hyper_mix_pre,
    hyper_pre,
    hyper_triplet,
    sinkhorn,
)
from metainfer.ops.norm.ref import rmsnorm

#: (rows, N, D, size of the site's scale)
SIZES = (
    (0, 4, 32, 1.0),
    (1, 4, 33, 1.0),
    (7, 4, 96, 4.0),
    (5, 4, 64, 0.0),
    (3, 2, 17, 8.0),
    (17, 3, 40, 1.0),
    (65, 4, 17, 1.0),
)


def _streams(g: torch.Generator, rows: int, n: int, d: int) -> Tensor:
    streams = normal(g, rows, n, d)
    if rows > 2:
        streams[1] = 0  # a padded row
        streams[2] = streams[2, :1]  # equal streams, as after the embedding
    return streams


def triplet_cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, n, d, size in SIZES:
        many = (n + 2) * n
        args = (
            _streams(g, rows, n, d),
            normal(g, many, n * d, scale=(n * d) ** -0.5).float(),
            normal(g, many).float(),
            (normal(g, 3) * size).float(),
        )
        found.append(
            _case(
                "hyper_triplet", (rows, n, d), size, args, norm_eps=1e-6, eps=1e-6, iters=20 - 3 * n
            )
        )
    return found


def pre_cases(seed: int) -> list[Case]:
    g = generator(seed + 1)
    return [
        Case(
            op="hyper_pre",
            name=case.name,
            args=(*case.args, (1 + normal(g, case.shape["d"]) / 4).float()),
            kwargs=case.kwargs,
            shape=case.shape,
        )
        for case in triplet_cases(seed)
    ]


def mix_pre_cases(seed: int) -> list[Case]:
    """The block's output and weights of `mix_cases`, the next site of `pre_cases`."""
    return [
        Case(
            op="hyper_mix_pre",
            name=before.name,
            args=(*before.args, *after.args[1:]),
            kwargs=after.kwargs,
            shape=before.shape,
        )
        for before, after in zip(mix_cases(seed), pre_cases(seed), strict=True)
    ]


def head_cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, n, d, size in SIZES:
        args = (
            _streams(g, rows, n, d),
            normal(g, n, n * d, scale=(n * d) ** -0.5).float(),
            normal(g, n).float(),
            (normal(g, 1) * size).float(),
        )
        found.append(_case("hyper_head", (rows, n, d), size, args, norm_eps=1e-6, eps=1e-6))
    return found


def collapse_cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, n, d, size in SIZES:
        pre = torch.sigmoid(normal(g, rows, n) * size).float()
        found.append(_case("hyper_collapse", (rows, n, d), size, (_streams(g, rows, n, d), pre)))
    return found


def mix_cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, n, d, size in SIZES:
        post = 2 * torch.sigmoid(normal(g, rows, n)).float()
        comb = sinkhorn(torch.softmax(normal(g, rows, n, n) * size, -1) + 1e-6, 1e-6, 3).float()
        args = (_streams(g, rows, n, d), normal(g, rows, d), post, comb)
        found.append(_case("hyper_mix", (rows, n, d), size, args))
    return found


def _case(
    op: str, sizes: tuple[int, int, int], size: float, args: tuple[Any, ...], **kwargs: Any
) -> Case:
    rows, n, d = sizes
    name = f"{rows}x{n}x{d}-{size:g}"
    return Case(op=op, name=name, args=args, kwargs=kwargs, shape={"rows": rows, "n": n, "d": d})


def collapse_recipe(streams: Tensor, pre: Tensor) -> Tensor:
    """The sum stream by stream, rounded once."""
    r = wide(streams)
    total = r[:, 0] * pre[:, :1]
    for k in range(1, r.shape[1]):
        total = total + r[:, k] * pre[:, k : k + 1]
    return total.to(streams.dtype)


def mix_recipe(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The published code's broadcast sums over j, rounded once."""
    r = wide(streams)
    kept = (comb.unsqueeze(-1) * r.unsqueeze(2)).sum(dim=1)
    return (post.unsqueeze(-1) * wide(y).unsqueeze(1) + kept).to(streams.dtype)


def pre_recipe(
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
    """As published: the collapse is rounded before its norm."""
    pre, post, comb = hyper_triplet(
        streams, fn, base, scale, norm_eps=norm_eps, eps=eps, iters=iters
    )
    return rmsnorm(collapse_recipe(streams, pre), norm_weight, norm_eps), post, comb


def mix_pre_recipe(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    *site: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As published: one after the other, the mixed streams rounded in between."""
    mixed = mix_recipe(streams, y, post, comb)
    return (mixed, *pre_recipe(mixed, *site, **kwargs))


CASES = {
    "hyper_pre": pre_cases,
    "hyper_mix_pre": mix_pre_cases,
    "hyper_triplet": triplet_cases,
    "hyper_collapse": collapse_cases,
    "hyper_mix": mix_cases,
    "hyper_head": head_cases,
}
REFERENCES = {
    "hyper_pre": hyper_pre,
    "hyper_mix_pre": hyper_mix_pre,
    "hyper_triplet": hyper_triplet,
    "hyper_collapse": hyper_collapse,
    "hyper_mix": hyper_mix,
    "hyper_head": hyper_head,
}
RECIPES = {
    **REFERENCES,
    "hyper_pre": pre_recipe,
    "hyper_mix_pre": mix_pre_recipe,
    "hyper_collapse": collapse_recipe,
    "hyper_mix": mix_recipe,
}
MISTAKES = {
    "hyper_mix": {
        "mix transposed": (lambda r, y, post, comb: hyper_mix(r, y, post, comb.transpose(1, 2)),),
    },
    "hyper_mix_pre": {
        "mix transposed": (
            lambda r, y, post, comb, *site, **k: hyper_mix_pre(
                r, y, post, comb.transpose(1, 2), *site, **k
            ),
        ),
        "Sinkhorn steps": (
            lambda *args, iters, **eps: hyper_mix_pre(*args, iters=max(iters - 4, 1), **eps),
        ),
    },
    "hyper_pre": {
        "Sinkhorn steps": (
            lambda *args, iters, **eps: hyper_pre(*args, iters=max(iters - 4, 1), **eps),
        ),
    },
}
