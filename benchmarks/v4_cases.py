"""What `v4_kernels.py` runs: V4-Flash's shapes, truths in float64, bytes and operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from metainfer.formats.activation import activation_fp8
from metainfer.ops.linear.fp8 import chunk, quantise, stream
from metainfer.ops.linear.tiles import ChunkTile, StreamTile
from metainfer.ops.moe_experts.choice import portable_for, wgmma_for
from metainfer.ops.moe_experts.mxfp4 import Mx, experts, prepare
from metainfer.ops.moe_experts.tiles import (
    CHUNK,
    PORTABLE_CHUNK,
    PORTABLE_STREAM,
    STREAM,
    WGMMA_CHUNK,
    WGMMA_MANY,
    WGMMA_SOME,
    WGMMA_STREAM,
    PipelinedTile,
    TableTile,
    Tile,
)
from metainfer.ops.out_group.fp8 import decoded, grouped
from metainfer.ops.out_group.torch_group import batched

BF16 = torch.bfloat16
ROUNDING = 0.0025
"""A correctly rounded bf16 result has a relative rms error of about 0.0017."""


@dataclass
class Work:
    """`call(i)` runs on the i-th of `copies` sets; `truth()` gives (float64, the recipe's)."""

    name: str
    variant: str
    call: Callable[[int], Tensor | tuple[Tensor, ...]]
    truth: Callable[[], tuple[Tensor, Tensor]]
    bytes: float
    flops: float
    rate: str = "fp8_flops"
    copies: int = 1
    floor: float = ROUNDING
    keep: list[object] = field(default_factory=list)


MATRICES = {
    "wq_b": (32768, 1024),
    "wo_b": (4096, 8192),
    "wq_a+wkv": (1536, 4096),
    "shared up+gate": (4096, 4096),
    "shared down": (4096, 2048),
    "indexer wq_b": (8192, 1024),
}


def _fp8_weights(n: int, k: int, copies: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for _ in range(copies):
        data = torch.empty(n, k, dtype=torch.float8_e4m3fn, device="cuda")
        for first in range(0, n, 4096):
            part = torch.randn(min(4096, n - first), k, device="cuda") * 60
            data[first : first + 4096] = part.clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.randint(110, 120, (-(-n // 128), k // 128), device="cuda").to(torch.uint8)
        found.append((data, scale))
    return found


def _fp8_dense(data: Tensor, scale: Tensor) -> Tensor:
    factor = torch.exp2(scale.double() - 127)
    wide = factor.repeat_interleave(128, 0)[: data.shape[0]].repeat_interleave(128, 1)
    return data.double() * wide


def _tokens(rows: int, k: int) -> Tensor:
    """Noise with channels and tokens of very different sizes, one token of zeros."""
    x = torch.randn(rows, k, device="cuda") * torch.exp(torch.randn(k, device="cuda"))
    if rows > 2:
        x[1], x[2] = 0, x[2] * 1e-5
    return x.to(BF16)


def linear(sweep: bool) -> Iterator[Work]:
    for name, (n, k) in MATRICES.items():
        yield from _matrix(name, n, k, sweep)


def _matrix(name: str, n: int, k: int, sweep: bool) -> Iterator[Work]:
    copies = max(2, min(12, -(-(200 << 20) // (n * k))))
    weights = _fp8_weights(n, k, copies)

    @cache
    def dense() -> Tensor:
        return _fp8_dense(*weights[0])

    def truth(x: Tensor) -> tuple[Tensor, Tensor]:
        exact = activation_fp8(x[:2048].double()) @ dense().T
        return exact, exact.to(BF16)

    for rows in (1, 16, 32):
        x = _tokens(rows, k)
        tiles: list[StreamTile | None] = [None]
        if sweep:
            tiles += [StreamTile(128, 8, 4), StreamTile(128, 8, 4, early=1)]
            tiles += [StreamTile(64, 4, 4, early=2)]
        for tile in tiles:
            yield Work(
                f"linear {name} m={rows}",
                _text(tile, "stream"),
                lambda i, x=x, t=tile: stream(x, *weights[i], tile=t),
                lambda x=x: truth(x),
                bytes=n * k + rows * 2 * (n + k),
                flops=2.0 * rows * n * k,
                copies=copies,
            )
    for rows in (64, 128, 2048, 8192):
        x = _tokens(rows, k)
        q = quantise(x)
        chunks: list[ChunkTile | None] = [None]
        if sweep and rows <= 128:
            chunks += [ChunkTile(64, 64, 4, 3, True), ChunkTile(64, 128, 4, 3, True)]
        for chunk_tile in chunks:
            yield Work(
                f"linear {name} m={rows}",
                _text(chunk_tile, "chunk"),
                lambda i, q=q, t=chunk_tile: chunk(*q, *weights[i], dtype=BF16, tile=t),
                lambda x=x: truth(x),
                bytes=n * k + rows * (k + 2 * n),
                flops=2.0 * rows * n * k,
                copies=2,
            )
    yield Work(
        f"quantise {k} m=8192",
        "",
        lambda i: _read_back(*quantise(x)),
        lambda: (activation_fp8(x.double()), activation_fp8(x)),
        bytes=8192 * k * 3,
        flops=0.0,
    )


def out_group(sweep: bool) -> Iterator[Work]:
    """wo_a: eight groups of 1024 rows, activations as they are."""
    groups, n, k = 8, 8192, 4096
    weights = _fp8_weights(n, k, 6)

    @cache
    def dense() -> Tensor:
        return _fp8_dense(*weights[0]).view(groups, n // groups, k)

    def truth(o: Tensor) -> tuple[Tensor, Tensor]:
        rows = o[:512].double().view(-1, groups, k)
        exact = torch.einsum("tgk,grk->tgr", rows, dense()).flatten(1)
        return exact, exact.to(BF16)

    for rows in (1, 16, 32, 64, 128, 512, 2048, 8192):
        o = _tokens(rows, groups * k)
        forms: dict[str, Callable[[int], Tensor]] = {}
        if rows <= 128:
            forms["fp8"] = lambda i, o=o: grouped(o, *weights[i], groups=groups)
        if rows >= 128:
            forms["decoded"] = lambda i, o=o: batched(o, decoded(*weights[i], o.dtype), groups)
        for name, call in forms.items():
            yield Work(
                f"out_group m={rows}",
                name,
                call,
                lambda o=o: truth(o),
                bytes=n * k + rows * 2 * (n + groups * k),
                flops=2.0 * rows * n * k,
                rate="bf16_flops",
                copies=6,
            )


def _read_back(q: Tensor, scales: Tensor) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        return q  # timed without it
    return (q.double().view(q.shape[0], -1, 128) * scales.T.double()[..., None]).flatten(1)


def _text(tile: object, default: str) -> str:
    if tile is None:
        return default
    return f"{default} " + "x".join(str(int(v)) for v in _values(tile))


def _values(tile: object) -> list[int]:
    return [getattr(tile, name) for name in tile.__dataclass_fields__]  # type: ignore[attr-defined]


AnyTile = Tile | TableTile
D, F, E, TOP = 4096, 2048, 256, 6


def _mx(rows: int, k: int) -> tuple[Tensor, Tensor]:
    data = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(116, 122, (rows, k // 32), dtype=torch.uint8, device="cuda")
    return data, scale


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _mx_dense(data: Tensor, scale: Tensor) -> Tensor:
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64, device=data.device)
    codes = torch.stack((data & 15, data >> 4), -1).flatten(1).long()
    return table[codes] * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)


def _experts_truth(
    x: Tensor, ids: Tensor, routes: Tensor, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor],
    limit: float, round_parts: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(the recipe in float64, the recipe in bf16 steps) of a few tokens."""
    rounded, f = activation_fp8(x.double()), up[0].shape[0] // (2 * E)
    exact = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    recipe = torch.zeros(x.shape, device=x.device)
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        w13 = _mx_dense(*(t[expert * 2 * f : (expert + 1) * 2 * f] for t in up))
        w2 = _mx_dense(*(t[expert * D : (expert + 1) * D] for t in down))
        gate, lift = (rounded[token] @ w13.T).chunk(2, -1)
        gate, lift = gate.clamp(max=limit), lift.clamp(-limit, limit)
        h = torch.nn.functional.silu(gate) * lift * routes[token, slot].double()[:, None]
        exact.index_add_(0, token, activation_fp8(h) @ w2.T)
        stepped = activation_fp8(h.to(BF16).double()) @ w2.T
        recipe.index_add_(0, token, stepped.to(BF16).float() if round_parts else stepped.float())
    return exact, recipe.to(BF16)


def _routes(rows: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(rows, E, device="cuda").argsort(1)[:, :TOP].int().contiguous()
    return ids, torch.rand(rows, TOP, device="cuda")


def moe(sweep: bool) -> Iterator[Work]:
    up, down = _mx(E * 2 * F, D), _mx(E * D, F)
    packed: tuple[Mx, Mx] = (prepare(*up), prepare(*down))
    assert packed[0].eight and packed[1].eight
    weight = (D * F * 3) * (0.5 + 1 / 32)
    limit = 4.0  # clamps part of what random weights give
    few: list[AnyTile] = [WGMMA_STREAM, STREAM]
    some: list[AnyTile] = [WGMMA_STREAM]
    middle: list[AnyTile] = [WGMMA_SOME, WGMMA_CHUNK, PipelinedTile(64, 32, 16, 4)]
    many: list[AnyTile] = [WGMMA_CHUNK, WGMMA_MANY, CHUNK]
    if sweep:
        few += [PORTABLE_STREAM, PipelinedTile(64, 8, 8, 4, 8, wgmma=False)]
        many += [PORTABLE_CHUNK]
    for rows in (1, 8, 32):
        x, copies = _tokens(rows, D), 6
        sets = [_routes(rows) for _ in range(copies)]
        distinct = sum(len(set(ids.flatten().tolist())) for ids, _ in sets) / copies
        truth = cache(lambda x=x, s=sets: _experts_truth(x, *s[0], up, down, limit, False))
        for tile in few:
            yield Work(
                f"experts m={rows} ({distinct:.0f} distinct)",
                _text(tile, "stream"),
                lambda i, x=x, s=sets, t=tile: experts(
                    x, *s[i], *packed, experts=E, limit=limit, tile=t
                ),
                truth,
                bytes=distinct * weight + rows * D * 4,
                flops=6.0 * rows * TOP * D * F,
                copies=copies,
            )
    for rows in (128, 512, 2048, 4096, 8192) if sweep else (128, 2048, 8192):
        x = _tokens(rows, D)
        chosen = _routes(rows)
        distinct = len(set(chosen[0].flatten().tolist()))
        truth = cache(lambda x=x, c=chosen: _experts_truth(x, *c, up, down, limit, True))
        for tile in {128: some, 512: middle}.get(rows, many):
            yield Work(
                f"experts m={rows} ({distinct} distinct)",
                _text(tile, "chunk"),
                lambda i, x=x, c=chosen, t=tile: experts(
                    x, *c, *packed, experts=E, limit=limit, tile=t
                ),
                truth,
                bytes=distinct * weight + rows * D * 4,
                flops=6.0 * rows * TOP * D * F,
            )

    # Rows whose scales span more than e4m3 holds: the bfloat16 form.
    spread = up[1].clone()
    spread[:, ::7] -= 13
    wide = prepare(up[0], spread)
    assert not wide.eight
    for rows in (8, 2048):
        x = _tokens(rows, D)
        chosen = _routes(rows)
        yield Work(
            f"experts m={rows}, wide scales",
            "bfloat16",
            lambda i, x=x, c=chosen: experts(x, *c, wide, packed[1], experts=E, limit=limit),
            cache(lambda x=x, c=chosen: _experts_truth(x, *c, (up[0], spread), down, limit, True)),
            bytes=min(E, rows * TOP) * weight,
            flops=6.0 * rows * TOP * D * F,
        )


def skewed(sweep: bool) -> Iterator[Work]:
    """Experts chosen evenly, and by Zipf's law (exponent 1): the first has up to 0.9 of the tokens.
    The first 128 tokens are judged."""
    up, down = _mx(E * 2 * F, D), _mx(E * D, F)
    packed, limit = (prepare(*up), prepare(*down)), 4.0
    law = -torch.log(torch.arange(1, E + 1, device="cuda"))
    for rows in (1024, 2048, 8192):
        x = _tokens(rows, D)
        chance = law - torch.rand(rows, E, device="cuda").log_().neg_().log_()  # Gumbel's noise
        ids = chance.topk(TOP, dim=1).indices.int().contiguous()
        for name, chosen in (
            ("even", _routes(rows)),
            ("zipf", (ids, torch.rand_like(chance[:, :TOP]))),
        ):
            few = (x[:128], chosen[0][:128], chosen[1][:128])
            truth = cache(lambda f=few: _experts_truth(*f, up, down, limit, True))
            distinct, pairs = len(set(chosen[0].flatten().tolist())), rows * TOP
            tiles: list[TableTile] = [wgmma_for(pairs, E, D, F)]
            if sweep and rows == 1024:
                tiles += [WGMMA_SOME, PipelinedTile(64, 32, 16, 4, 8), PipelinedTile(64, 64, 16, 4)]
            for tile in tiles:
                yield Work(
                    f"experts m={rows} {name} ({distinct} distinct)",
                    _text(tile, "chunk"),
                    lambda i, x=x, c=chosen, t=tile: experts(
                        x, *c, *packed, experts=E, limit=limit, tile=t
                    ),
                    truth,
                    bytes=distinct * (D * F * 3) * (0.5 + 1 / 32) + rows * D * 4,
                    flops=6.0 * pairs * D * F,
                )


def narrow(sweep: bool) -> Iterator[Work]:
    """Experts of one rank of eight, cut along their hidden channels."""
    f, limit = F // 8, 4.0
    up, down = _mx(E * 2 * f, D), _mx(E * D, f)
    packed = (prepare(*up), prepare(*down))
    for rows in (1, 8, 32, 2048, 8192):
        x, copies = _tokens(rows, D), 4
        sets = [_routes(rows) for _ in range(copies)]
        distinct = sum(len(set(ids.flatten().tolist())) for ids, _ in sets) / copies
        pairs = rows * TOP
        truth = cache(lambda x=x, s=sets, r=rows: _experts_truth(x, *s[0], up, down, limit, r > 32))
        tiles: list[tuple[str, AnyTile | None]] = [("hopper", wgmma_for(pairs, E, D, f))]
        tiles += [("portable", portable_for(pairs, E)), ("plain", None)]
        for name, tile in tiles:
            yield Work(
                f"experts m={rows} f={f} ({distinct:.0f} distinct)",
                name,
                lambda i, x=x, s=sets, t=tile: experts(
                    x, *s[i], *packed, experts=E, limit=limit, tile=t
                ),
                truth,
                bytes=distinct * D * f * 3 * (0.5 + 1 / 32) + rows * D * 4,
                flops=6.0 * pairs * D * f,
                copies=copies,
            )


SECTIONS: dict[str, Callable[[bool], Iterator[Work]]] = {
    "linear": linear,
    "out_group": out_group,
    "experts": moe,
    "narrow": narrow,
    "skewed": skewed,
}
