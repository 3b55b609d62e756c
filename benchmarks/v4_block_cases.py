"""What `v4_kernels.py` runs between the products: streams, latents, compressors, activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from v4_cases import BF16, Work

from metainfer.engine.machine import open_machine
from metainfer.kv.book.form import EntryForm, index_fp4, index_fp8, latent_fp8, latent_plain
from metainfer.kv.store.entries import EntryPages, StateRows, gather
from metainfer.ops.activation import ref as activation
from metainfer.ops.activation.cases import clamp_recipe
from metainfer.ops.activation.triton import swiglu_clamp
from metainfer.ops.compress import ref as compressors
from metainfer.ops.compress.tiles import Tile as CompressTile
from metainfer.ops.compress.triton import compress
from metainfer.ops.hyper import ref as hyper
from metainfer.ops.hyper import triton_calls
from metainfer.ops.hyper.cases import mix_pre_recipe, pre_recipe
from metainfer.ops.hyper.tiles import LONG, MIDDLE, SHORT, Tile
from metainfer.ops.hyper.triton_calls import hyper_mix_pre, hyper_pre
from metainfer.ops.latent_qkv import ref as latents
from metainfer.ops.latent_qkv.cases import recipe as latent_recipe
from metainfer.ops.latent_qkv.triton import latent_qkv
from metainfer.ops.qualify import qualify_all

DEVICE = "cuda"
ROWS = (1, 8, 32, 128, 8192)
JUDGED = 256
"""Rows whose result is judged."""

N, D, HEADS, WIDTH, R, PAGE = 4, 4096, 64, 512, 64, 64
HYPER = {"norm_eps": 1e-6, "eps": 1e-6, "iters": 20}


def _noise(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE) * scale


def _joined(*parts: Tensor) -> Tensor:
    """Every part of a result, row by row; while a graph is captured the first alone."""
    if DEVICE == "cuda" and torch.cuda.is_current_stream_capturing():
        return parts[0]
    return torch.cat([part.flatten(1).double() for part in parts], 1)


def _first(*args: Tensor) -> tuple[Tensor, ...]:
    return tuple(arg[:JUDGED] for arg in args)


#: By rows: how their tokens and channels are cut in other ways.
TILES: dict[int, dict[str, Tile]] = {
    1: {"not early": replace(SHORT, early=False)},
    32: {"not early": replace(SHORT, early=False)},
    128: {
        "64 splits": replace(MIDDLE, splits=64),
        "2 warps down": replace(MIDDLE, down=2),
    },
    8192: {
        "2 warps down": replace(LONG, down=2, programs=16),
        "8 warps down": replace(LONG, down=8),
        "16 splits": replace(LONG, splits=16, programs=32),
        "64 channels": replace(LONG, d=64),
    },
}


def _tiled(tile: Tile, *args: Tensor) -> tuple[Tensor, ...]:
    """`hyper_mix_pre` with its tokens cut as `tile` says."""
    before, triton_calls.tile_for = triton_calls.tile_for, lambda rows: tile
    try:
        return hyper_mix_pre(*args, **HYPER)
    finally:
        triton_calls.tile_for = before


@cache
def _proven() -> Tensor:
    """The ops' cases on this card."""
    machine = open_machine("cuda")
    impls = [i for i in machine.registry.impls() if i.op.startswith("hyper_")]
    found = qualify_all(
        [i for i in impls if i.provider == "triton"], "bfloat16", DEVICE, machine.facts,
        machine.registry,
    )  # fmt: skip
    reasons = [reason for each in found for reason in each.reasons]
    if reasons:
        raise RuntimeError("; ".join(reasons))
    return torch.ones(1, device=DEVICE)


def streams(sweep: bool) -> Iterator[Work]:
    if sweep:
        cases = Work("hyper cases", "", lambda i: _proven(), lambda: (_proven().double(),) * 2,
                     bytes=1, flops=0.0, rate="bf16_flops", copies=1)  # fmt: skip
        yield cases
    for rows in ROWS:
        copies = 40 if rows < 1024 else 2  # a site's matrix has 1.6 MB
        sites = [
            (
                _noise(24, N * D, scale=(N * D) ** -0.5), _noise(24), _noise(3),
                1 + _noise(D, scale=0.1),
            )
            for _ in range(copies)
        ]  # fmt: skip
        r, y = _noise(rows, N, D).to(BF16), _noise(rows, D).to(BF16)
        post, comb = torch.rand(rows, N, device=DEVICE) * 2, _noise(rows, N, N).softmax(-1)
        state = (r, y, post, comb)
        moved = rows * D * 2

        def truth(sites: Any = sites, state: Any = state) -> tuple[Tensor, Tensor]:
            some = _first(*state)
            exact = hyper.hyper_mix_pre(*(a.double() for a in (*some, *sites[0])), **HYPER)
            return _joined(*exact), _joined(*mix_pre_recipe(*some, *sites[0], **HYPER))

        def entry(sites: Any = sites, r: Tensor = r) -> tuple[Tensor, Tensor]:
            exact = hyper.hyper_pre(*(a.double() for a in (r[:JUDGED], *sites[0])), **HYPER)
            return _joined(*exact), _joined(*pre_recipe(r[:JUDGED], *sites[0], **HYPER))

        yield Work(
            f"hyper_mix_pre m={rows}",
            "",
            lambda i, s=sites, a=state: _joined(*hyper_mix_pre(*a, *s[i], **HYPER)),
            truth,
            bytes=moved * (2 * N + 2) + 24 * N * D * 4,
            flops=6.0 * rows * 24 * N * D,
            rate="bf16_flops",
            copies=copies,
        )
        for name, tile in TILES.get(rows, {}).items() if sweep else ():
            yield Work(
                f"hyper_mix_pre m={rows}",
                name,
                lambda i, s=sites, a=state, tile=tile: _joined(*_tiled(tile, *a, *s[i])),
                truth,
                bytes=moved * (2 * N + 2) + 24 * N * D * 4,
                flops=6.0 * rows * 24 * N * D,
                rate="bf16_flops",
                copies=copies,
            )
        yield Work(
            f"hyper_pre m={rows}",
            "",
            lambda i, s=sites, r=r: _joined(*hyper_pre(r, *s[i], **HYPER)),
            entry,
            bytes=moved * (N + 1) + 24 * N * D * 4,
            flops=6.0 * rows * 24 * N * D,
            rate="bf16_flops",
            copies=copies,
        )

        def weights(sites: Any = sites, r: Tensor = r) -> tuple[Tensor, Tensor]:
            exact = hyper.hyper_pre(*(a.double() for a in (r[:JUDGED], *sites[0])), **HYPER)
            return _joined(*exact[1:]), _joined(*pre_recipe(r[:JUDGED], *sites[0], **HYPER)[1:])

        yield Work(
            f"hyper_pre m={rows}, float32",
            "",
            lambda i, s=sites, r=r: _joined(*hyper_pre(r, *s[i], **HYPER)[1:]),
            weights,
            bytes=moved * (N + 1) + 24 * N * D * 4,
            flops=6.0 * rows * 24 * N * D,
            rate="bf16_flops",
            floor=1e-6,  # that of a case: other orders of sums
            copies=copies,
        )


def _empty(form: EntryForm, entries: int) -> EntryPages:
    pages = -(-entries // PAGE) + 1
    if form.scale == "none":
        data = torch.full((pages, PAGE, form.width), torch.nan, dtype=BF16, device=DEVICE)
    else:
        shape = (pages, form.page_bytes(PAGE))
        data = torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)
    return EntryPages(0, data, form, PAGE)


def _table(positions: int) -> Tensor:
    angles = torch.rand(positions, R // 2, device=DEVICE) * 6.3
    return torch.cat((angles.cos(), angles.sin()), 1)


def latent(sweep: bool) -> Iterator[Work]:
    table = _table(8192)
    weight = 1 + _noise(WIDTH, scale=0.1)
    options = {"eps": 1e-6, "norm_q": True}
    for form in (latent_plain(WIDTH, R, "bfloat16"), latent_fp8(WIDTH, R)):
        for rows in ROWS:
            q = _noise(rows, HEADS, WIDTH).to(BF16)
            kv = _noise(rows, 1024 + WIDTH).to(BF16)[:, 1024:]
            positions = torch.randint(0, 8192, (rows,), device=DEVICE)
            slots = torch.randperm(rows, device=DEVICE) + PAGE
            pages = _empty(form, rows)

            def call(
                i: int, q: Tensor = q, rest: Any = (kv, positions), to: Any = (pages, slots)
            ) -> Tensor:
                out = latent_qkv(q, rest[0], weight, rest[1], table, *to, **options)
                return _joined(out, *_stored(*to))

            def truth(
                q: Tensor = q, rest: Any = (kv, positions), to: Any = (pages, slots)
            ) -> tuple[Tensor, Tensor]:
                (q, kv, at, slots), found = _first(q, *rest, to[1]), []
                for function, kind in ((latents.latent_qkv, torch.float64), (latent_recipe, BF16)):
                    fresh = _empty(to[0].form, to[0].data.shape[0] * PAGE)
                    out = function(
                        q.to(kind), kv.to(kind), weight, at, table, fresh, slots, **options
                    )
                    found.append(_joined(out, *_stored(fresh, slots)))
                return found[0], found[1]

            yield Work(
                f"latent_qkv {form.layout} m={rows}",
                "",
                call,
                truth,
                bytes=rows * ((2 * HEADS + 1) * WIDTH * 2 + form.bytes),
                flops=0.0,
                rate="bf16_flops",
                copies=4,
            )


def _stored(pages: EntryPages, slots: Tensor) -> tuple[Tensor, ...]:
    """What was written at `slots`; nothing while a graph is captured."""
    if DEVICE == "cuda" and torch.cuda.is_current_stream_capturing():
        return ()
    return (gather(pages, slots),)


#: (name, form, ratio, overlap)
COMPRESSORS = (
    ("csa", latent_plain(WIDTH, R, "bfloat16"), 4, True),
    ("csa", latent_fp8(WIDTH, R), 4, True),
    ("hca", latent_plain(WIDTH, R, "bfloat16"), 128, False),
    ("index", index_fp8(128), 4, True),
    ("index", index_fp4(128), 4, True),
)


def compressed(sweep: bool) -> Iterator[Work]:
    for name, form, ratio, overlap in COMPRESSORS:
        others = (CompressTile(32, 128, 4), CompressTile(16, 128, 4))
        for sequences, queries in ((1, 1), (32, 1), (128, 1), (1, 8192)):
            tried = sweep and ratio == 128 and sequences != 32
            for tile in (None, *(others if tried else ())):
                yield _compressor(name, form, ratio, overlap, sequences, queries, tile)
                if queries == 1 < sequences and ratio == 128:
                    yield _compressor(name, form, ratio, overlap, sequences, 1, tile, apart=True)


def _compressor(
    name: str, form: EntryForm, ratio: int, overlap: bool, sequences: int, queries: int,
    tile: CompressTile | None, apart: bool = False,
) -> Work:  # fmt: skip
    """Every decoded token closes a window, whose other rows come from the ring: the dearest.
    `apart`: the first sequence's alone does, the others are at other places of theirs."""
    d, halves, rows = form.width, 1 + overlap, sequences * queries
    context, length = 8192 + queries - queries % ratio, ratio * halves + 8
    if queries == 1:
        context = 8192
    wide = _noise(rows, 2 * halves * d + 64)
    kv, gate = wide[:, : halves * d], wide[:, halves * d : 2 * halves * d]
    ring = StateRows(0, _noise(sequences + 1, 2, length, halves * d))
    at = torch.arange(context - queries, context, device=DEVICE).repeat(sequences)
    if apart:
        at += torch.arange(sequences, device=DEVICE)
    closing = (at + 1) % ratio == 0
    slots = torch.where(closing, torch.cumsum(closing, 0) - 1 + PAGE, -1)
    pages = _empty(form, int(closing.sum()))
    args = (
        _noise(ratio, halves * d), 1 + _noise(d, scale=0.1), _table(int(at.max()) + 1),
    )  # fmt: skip
    where = (
        torch.arange(0, rows + 1, queries, dtype=torch.int32, device=DEVICE),
        at.view(sequences, -1)[:, -1].int() + 1,
    )
    lines = torch.arange(sequences, device=DEVICE)
    options: dict[str, Any] = {"ratio": ratio, "overlap": overlap, "eps": 1e-6}
    before = ring.data.clone()
    kept = slots[closing][:JUDGED]

    def run(function: Callable[..., None], raw: StateRows, to: EntryPages, *parts: Tensor) -> None:
        function(*parts, *args, raw, lines, to, slots, *where, **options)

    def call(i: int) -> Tensor:
        run(partial(compress, tile=tile), ring, pages, kv, gate)
        stored = _stored(pages, kept)
        return _joined(*stored) if stored else wide

    def truth() -> tuple[Tensor, Tensor]:
        found = []
        for kind in (torch.float64, torch.float32):
            fresh = _empty(form, pages.data.shape[0] * PAGE)
            raw = StateRows(0, before.to(kind))
            run(compressors.compress, raw, fresh, kv.to(kind), gate.to(kind))
            found.append(_joined(*_stored(fresh, kept)))
        return found[0], found[1]

    read = rows * halves * d * 8.0
    old = int(closing.sum()) * (ratio * halves - 1) * d * 8.0 if queries == 1 else 0.0
    return Work(
        f"compress {name} {form.layout} {sequences} x {queries}{' apart' * apart}",
        f"{tile.slice}x{tile.rows}x{tile.warps}" if tile else "",
        call,
        cache(truth),
        bytes=read + old + min(rows, sequences * length) * halves * d * 8.0
        + int(closing.sum()) * form.bytes,
        flops=0.0,
        rate="bf16_flops",
        # Next to a border of a scaled form's grid another order of sums may land a step off.
        floor=0.0025 if form.scale == "none" else 0.004,
        copies=1 if queries > 1 else 4,
    )  # fmt: skip


def swiglu(sweep: bool) -> Iterator[Work]:
    for rows in ROWS:
        x = _noise(rows, 4096, scale=4.0).to(BF16)
        yield Work(
            f"swiglu_clamp m={rows}",
            "",
            lambda i, x=x: swiglu_clamp(x, 10.0),
            lambda x=x: (activation.swiglu_clamp(x.double(), 10.0), clamp_recipe(x, 10.0)),
            bytes=rows * 2048 * 6,
            flops=0.0,
            rate="bf16_flops",
            copies=4,
        )


SECTIONS: dict[str, Callable[[bool], Iterator[Work]]] = {
    "streams": streams,
    "latent": latent,
    "compress": compressed,
    "swiglu": swiglu,
}
