"""What `v4_kernels.py` runs: V4-Flash's shapes, truths in float64, bytes and operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from metainfer.formats.activation import activation_fp8
from metainfer.kv.book.form import EntryForm, plain
from metainfer.kv.store.entries import EntryPages, gather, locate, store
from metainfer.ops.attn_sparse.tiles import (
    FEW,
    FEW_SCALED,
    HOPPER,
    SLICED,
    SMALL_SCALED,
    WGMMA_SCALED,
    HopperTile,
)
from metainfer.ops.attn_sparse.tiles import Tile as AttnTile
from metainfer.ops.attn_sparse.triton_calls import attn_sparse, wgmma, wgmma_scaled
from metainfer.ops.common import rotate_tail
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


LATENT = plain("latent@1", 512, "bfloat16", tail=64)
LATENT_FP8 = EntryForm(
    layout="latent-fp8@1", width=512, stored="uint8", bytes=584, tail=64, scale="pow2", group=64,
    page_multiple=576,
)  # fmt: skip


def _pages(form: EntryForm, pages: int, entries: int) -> EntryPages:
    if form.scale == "none":
        return EntryPages(
            0, torch.randn(pages, entries, 512, device="cuda").to(BF16), form, entries
        )
    data = torch.zeros(pages, form.page_bytes(entries), dtype=torch.uint8, device="cuda")
    held = EntryPages(0, data, form, entries)
    for first in range(0, pages * entries, 1 << 16):
        slots = torch.arange(first, min(first + (1 << 16), pages * entries), device="cuda")
        store(held, slots, torch.randn(len(slots), 512, device="cuda"))
    return held


def sparse(sweep: bool) -> Iterator[Work]:
    for form in (LATENT, LATENT_FP8):
        for queries, sequences, context, top in (
            (1, 1, 1024, 512), (1, 8, 1024, 512), (1, 32, 1024, 512), (1, 1, 131072, 512),
            (1, 8, 131072, 512), (1, 8, 131072, 0), (2048, 1, 40960, 512), (8192, 1, 40960, 512),
        ):  # fmt: skip
            yield from _attention(form, queries, sequences, context, top, sweep)


def _picked(positions: Tensor, ratio: int, count: int, top: int) -> Tensor:
    """Random entries of those each query sees, rising, then -1: [T, top] int32."""
    picked = torch.full((len(positions), top), -1, dtype=torch.int32, device="cuda")
    for first in range(0, len(positions), 1024):
        part = slice(first, first + 1024)
        seen = ((positions[part] + 1) // ratio)[:, None]
        chance = torch.rand(len(seen), count, device="cuda")
        chance.masked_fill_(torch.arange(count, device="cuda") >= seen, -1.0)
        best = chance.topk(min(top, count), dim=1)
        kept = torch.where(best.values < 0, 1 << 30, best.indices).sort(1).values
        picked[part, : kept.shape[1]] = torch.where(kept == 1 << 30, -1, kept).int()
    return picked


def _attention_tiles(form: EntryForm, rows: int) -> list[AttnTile | HopperTile]:
    plain = form.scale == "none"
    if rows <= 32:
        return [FEW, HOPPER] if plain else [FEW_SCALED, WGMMA_SCALED]
    return [HopperTile(resident=False)] if plain else []


def _attention(
    form: EntryForm,
    queries: int,
    sequences: int,
    context: int,
    top: int,
    sweep: bool,
    foreign: Callable[..., Tensor] | None = None,
) -> Iterator[Work]:
    rows, ratio = queries * sequences, 4 if top else 128
    count = context // ratio
    width = -(-count // 64)
    entries = _pages(form, sequences * width + 1, 64)
    entry_table = torch.randperm(sequences * width, device="cuda").view(sequences, -1).int() + 1
    local_pages = -(-(queries + 128) // 64) + 1
    local = _pages(form, sequences * local_pages + 1, 64)
    local_table = torch.full((sequences, context // 64), -1, dtype=torch.int32, device="cuda")
    used = min(local_pages, context // 64)
    order = torch.randperm(sequences * local_pages, device="cuda").view(sequences, -1).int() + 1
    local_table[:, -used:] = order[:, :used]
    positions = torch.arange(context - queries, context, device="cuda").repeat(sequences)
    picked = _picked(positions, ratio, count, top) if top else None
    q = torch.randn(rows, 64, 512, device="cuda").to(BF16)
    sinks = torch.randn(64, device="cuda")
    angles = torch.rand(context, 32, device="cuda") * 6.3
    table = torch.cat((angles.cos(), angles.sin()), 1)
    start = torch.arange(0, rows + 1, queries, dtype=torch.int32, device="cuda")
    lens = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
    scale = 512**-0.5

    def truth() -> tuple[Tensor, Tensor]:
        n = min(rows, 48)
        exact, stepped = [], []
        for t in range(n):
            s, p = t // queries, int(positions[t])
            near = torch.arange(max(0, p - 127), p + 1, device="cuda")
            far = torch.arange((p + 1) // ratio, device="cuda")
            if picked is not None:
                far = picked[t][picked[t] >= 0].long()
            keys = torch.cat((gather(local, locate(local_table[s], 64, near)),
                              gather(entries, locate(entry_table[s], 64, far))))  # fmt: skip
            for kind, into in ((torch.float64, exact), (torch.float32, stepped)):
                k = keys.to(BF16).to(kind)
                logits = q[t].to(kind) @ k.T * scale
                full = torch.cat((logits, sinks.to(kind)[:, None]), 1).softmax(1)[:, :-1]
                if kind == torch.float32:
                    full = full.to(BF16).float()
                into.append(rotate_tail(full @ k, table[p], inverse=True))
        return torch.stack(exact), torch.stack(stepped).to(BF16)

    keys = min(context, 128) + (min(top, count) if top else count)
    small = SLICED if form.scale == "none" else SMALL_SCALED
    tiles = _attention_tiles(form, rows) if sweep else []
    element = 1024 if form.scale == "none" else 584
    args = (q, local, local_table, entries, entry_table, picked, sinks, table, positions, start)
    options: dict[str, Any] = {"scale": scale, "window": 128, "ratio": ratio}
    forms: dict[str, Callable[[int], Tensor]] = {
        _text(tile, ""): lambda i, t=tile: attn_sparse(*args, lens, **options, tile=t, hopper=True)
        for tile in tiles
    }
    if rows <= 2048 and (form.scale == "none" or rows <= 32):
        forms["smaller cards"] = lambda i: attn_sparse(*args, lens, **options, tile=small)
    chosen = wgmma if form.scale == "none" else wgmma_scaled
    forms["as shapes choose"] = lambda i: chosen(*args, lens, **options)
    for text, call in forms.items():
        kind = "prefill" if queries > 1 else "decode"
        yield Work(
            f"sparse {kind} {form.layout} q={rows} L={context} k={top}",
            text,
            call,
            cache(truth),
            bytes=min(rows * keys, sequences * (count + queries + 128)) * element
            + rows * 64 * 512 * 4,
            flops=4.0 * rows * 64 * 512 * keys,
            rate="bf16_flops",
            copies=4 if queries == 1 else 1,
        )


SECTIONS: dict[str, Callable[[bool], Iterator[Work]]] = {
    "linear": linear,
    "out_group": out_group,
    "experts": moe,
    "narrow": narrow,
    "sparse": sparse,
}
