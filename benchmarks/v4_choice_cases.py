"""What `v4_kernels.py` runs of the kernels that choose: entries, experts, tokens.

A choice is right or wrong, so inputs are small multiples of powers of two and scores are exact: any
difference from the reference fails (`floor` 0, or rounding where weights come along).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from v4_cases import BF16, ROUNDING, Work

from metainfer.kv.book.form import entry_form
from metainfer.kv.store.entries import EntryPages, store
from metainfer.ops.indexer import cases as indexer_cases
from metainfer.ops.indexer import ref as indexer
from metainfer.ops.indexer.tiles import Tile
from metainfer.ops.indexer.triton_calls import index_query, index_select
from metainfer.ops.moe_experts.choice import wgmma_for
from metainfer.ops.moe_experts.plan import planned, sorted_plan
from metainfer.ops.moe_route import cases as route_cases
from metainfer.ops.moe_route import ref as router
from metainfer.ops.moe_route.tiles import FEW, SOME
from metainfer.ops.moe_route.tiles import Tile as RouteTile
from metainfer.ops.moe_route.tiles import tile_for as route_tile
from metainfer.ops.moe_route.triton_calls import moe_route, moe_route_hash
from metainfer.ops.rope.tables import RopeSpec, cos_sin
from metainfer.ops.sample import ref as sampler
from metainfer.ops.sample.inputs import SampleInputs
from metainfer.ops.sample.tiles import TILE
from metainfer.ops.sample.tiles import Tile as SampleTile
from metainfer.ops.sample.triton_calls import sample

D = 128
JUDGED = 16
"""Rows of a long call that are compared."""

ROTATED = 128 << 20
"""Bytes of keys, or of queries, that short calls take in turn."""


def _turns(bytes_: float) -> int:
    """Sets of inputs of a call that reads so many bytes."""
    return max(4, min(256, int(ROTATED / bytes_)))


def _exact(steps: int, *shape: int) -> Tensor:
    return torch.randint(-steps, steps + 1, shape, device="cuda").float() / 4


def _same(truth: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
    """A truth that the recipe meets exactly."""
    return cache(lambda: (truth().double(), truth().double()))


def indexing(sweep: bool) -> Iterator[Work]:
    yield from _queries(sweep)
    spans = (
        (1, 1, 8192), (1, 8, 8192), (1, 32, 8192), (1, 1, 131072), (1, 8, 131072),
        (1, 1, 1 << 20), (2048, 1, 8192), (8192, 1, 8192), (8192, 1, 131072),
    )  # fmt: skip
    for layout in ("index@1", "index-fp4@1"):
        for queries, sequences, context in spans:
            yield from _selection(layout, queries, sequences, context, 4, 512, 64, sweep)
    for queries, sequences, context in ((1, 1, 131072), (1, 8, 131072), (2048, 1, 131072)):
        yield from _selection("index-fp8@1", queries, sequences, context, 1, 2048, 64, sweep)


def _queries(sweep: bool) -> Iterator[Work]:
    table = cos_sin(RopeSpec(rotated=64), 4096).cuda()
    for layout in ("index@1", "index-fp8@1", "index-fp4@1"):
        form = entry_form(layout, D, 0, "bfloat16")
        for rows in (1, 32, 8192):
            turns = min(_turns(2.0 * rows * 64 * D), 32)
            q = torch.randn(turns, rows, 64, D, device="cuda").to(BF16)
            positions = torch.arange(rows, device="cuda") % 4096

            def truth(q: Tensor = q[0], p: Tensor = positions, form: Any = form) -> Any:
                few = (q[:JUDGED], p[:JUDGED], table)
                exact = indexer.index_query(few[0].double(), *few[1:], form)
                return exact, indexer_cases.query_recipe(*few, form)

            for heads in (0, 4, 16) if sweep and layout == "index-fp4@1" else (0,):

                def call(
                    i: int, q: Tensor = q, p: Tensor = positions, form: Any = form, n: int = heads
                ) -> Tensor:
                    return index_query(q[i % len(q)], p, table, form, heads_each=n)

                yield Work(
                    f"index query {layout} m={rows}",
                    f"{heads} heads" if heads else "",
                    call,
                    cache(truth),
                    bytes=4.0 * rows * 64 * D,
                    flops=0.0,
                    copies=turns,
                    floor=ROUNDING if layout == "index@1" else 0.02,
                )


def _selection(
    layout: str, queries: int, sequences: int, context: int, ratio: int, top: int, heads: int,
    sweep: bool,
) -> Iterator[Work]:  # fmt: skip
    rows, count = queries * sequences, context // ratio
    form = entry_form(layout, D, 0, "bfloat16")
    turns = 1 if queries > 1 else _turns(sequences * count * form.bytes)
    width = -(-count // 64)
    shape = (turns * sequences * width + 1, 64, D)
    if form.scale == "none":
        pages = EntryPages(0, (torch.randint(-3, 4, shape, device="cuda") / 2).to(BF16), form, 64)
    else:
        data = torch.zeros(shape[0], form.page_bytes(64), dtype=torch.uint8, device="cuda")
        pages = EntryPages(0, data, form, 64)
        for first in range(0, shape[0] * 64, 1 << 16):
            slots = torch.arange(first, min(first + (1 << 16), shape[0] * 64), device="cuda")
            values = torch.randint(-1, 2, (len(slots), D), device="cuda") * 1.75
            values[:, 0] = 1.75
            store(pages, slots, values)
    places = torch.randperm(turns * sequences * width, device="cuda") + 1
    tables = places.view(turns, sequences, width).int()
    positions = torch.arange(context - queries, context, device="cuda").repeat(sequences)
    q, g = _exact(3, rows, heads, D).to(BF16), _exact(4, rows, heads)
    start = torch.arange(0, rows + 1, queries, dtype=torch.int32, device="cuda")
    lens = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"ratio": ratio, "top_k": top, "scale": 2.0**-7}

    def truth() -> Tensor:
        """Of rows across the first two sequences, or of the first rows of one."""
        many, table = min(queries, JUDGED), tables[0]
        if queries > 1:
            few, spans = (q[:many], g[:many]), torch.tensor([0, many], dtype=torch.int32)
            return indexer.index_select(
                *few, pages, table[:1], positions[:many], spans, lens[:1], **options
            )
        return indexer.index_select(
            q[:2], g[:2], pages, table[:2], positions[:2], start[:3], lens[:2], **options
        )

    seen = (positions + 1) // ratio
    scored = float(torch.where(seen > top, seen, 0).sum())
    kind = "prefill" if queries > 1 else "decode"
    tried = sweep and layout != "index-fp8@1" and rows in (1, 8192)
    for variant, cut in (_CUTS[kind] if tried else {"": {}}).items():
        yield Work(
            f"index {kind} {layout} q={rows} L={context} k={top}",
            variant,
            lambda i, c=cut: index_select(
                q, g, pages, tables[i], positions, start, lens, **options, **c
            ),
            _same(truth),
            bytes=sequences * count * form.bytes + rows * heads * D * 2 + 4 * scored,
            flops=2.0 * scored * heads * D,
            rate="bf16_flops",
            copies=turns,
            floor=0.0,
        )


_CUTS: dict[str, dict[str, dict[str, Any]]] = {
    "decode": {
        "": {},
        "128x4x3": {"tile": Tile(128, 4, 3)},
        "4096 at once": {"lanes": 4096},
    },
    "prefill": {
        "": {},
        "128x8x3 in 2": {"tile": Tile(128, 8, 3, parts=2)},
        "256x8x2 in 2": {"tile": Tile(256, 8, 2, parts=2, registers=128)},
        "4096 at once": {"lanes": 4096},
    },
}
"""Other tiles, and other numbers of scores that a row's program holds."""


K, E, TOP = 4096, 256, 6
GATES = 32
"""Copies of the gate that take turns: together they are more than a cache holds."""

ROUTE_TILES = {
    1: (FEW, RouteTile(16, 16, 512, 8, 4, 2, True), RouteTile(16, 32, 256, 16, 4, 2, True)),
    32: (FEW, RouteTile(16, 16, 512, 8, 4, 2, True), RouteTile(32, 16, 128, 8, 4, 5, True)),
    128: (SOME, RouteTile(64, 32, 128, 8, 4, 4, True)),
    2048: (RouteTile(128, 128, 128, 4, 8, 3), RouteTile(128, 64, 64, 4, 4, 4)),
    8192: (RouteTile(128, 128, 64, 2, 8, 3), RouteTile(256, 128, 64, 1, 8, 3)),
}


def routing(sweep: bool) -> Iterator[Work]:
    gates = [(_exact(4, E, K) / 16).to(BF16) for _ in range(GATES)]
    bias = _exact(64, E) / 16
    table = torch.rand(129280, E, device="cuda").argsort(1)[:, :TOP].contiguous()
    for rows in (1, 8, 32, 128, 2048, 8192):
        x = _exact(3, rows, K).to(BF16)
        tokens = torch.randint(129280, (rows,), device="cuda")
        hashed = (moe_route_hash, router.moe_route_hash, (table, tokens), {})
        scored = (moe_route, router.moe_route, (bias,), {"top_k": TOP})
        yield _routed(f"route by token m={rows}", x, gates, hashed)
        for tile in (None, *(ROUTE_TILES.get(rows, ()) if sweep else ())):
            yield _routed(f"route by score m={rows}", x, gates, scored, tile)
        if rows in (8, 2048, 8192):
            wide = [gate.float() for gate in gates[: GATES // 2]]
            yield _routed(f"route by score, float32 gate m={rows}", x, wide, scored)
    for rows in (8, 128, 2048, 8192):  # noise: what is left is the rounding of sums
        x = torch.randn(rows, K, device="cuda").to(BF16)
        noise = [(torch.randn(E, K, device="cuda") / 50).to(BF16)]
        tokens = torch.randint(129280, (rows,), device="cuda")

        def truth(x: Tensor = x, gate: Tensor = noise[0], tokens: Tensor = tokens) -> Any:
            exact = router.moe_route_hash(x.double(), gate.double(), table, tokens, scale=1.5)
            recipe = route_cases.hash_recipe(x, gate, table, tokens, scale=1.5)
            return exact[1], recipe[1].double()

        yield Work(
            f"route weights, noise m={rows}", "",
            lambda i, x=x, g=noise[0], t=tokens: moe_route_hash(x, g, table, t, scale=1.5)[1],
            cache(truth), bytes=rows * K * 2 + E * K * 2, flops=2.0 * rows * K * E,
            rate="bf16_flops", floor=0.0,
        )  # fmt: skip
    yield from _sorting()


def _routed(
    name: str, x: Tensor, gates: list[Tensor],
    op: tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...], dict[str, Any]],
    tile: RouteTile | None = None,
) -> Work:  # fmt: skip
    mine, theirs, more, options = op
    shown = tile or route_tile(len(x), torch.cuda.get_device_capability())

    def truth() -> Tensor:
        both = theirs(x.double(), gates[0].double(), *more, scale=1.5, **options)
        return torch.cat([part.double() for part in both], dim=1)

    def call(i: int) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = mine(x, gates[i], *more, scale=1.5, **options, tile=tile)
        return found

    return Work(
        name,
        f"{shown.m}x{shown.e}x{shown.k}/{shown.splits} {shown.warps}x{shown.stages}"
        + " early" * shown.early,
        call,
        _same(truth),
        bytes=x.nbytes + gates[0].nbytes,
        flops=2.0 * len(x) * K * E * (3 if gates[0].element_size() == 4 else 1),
        rate="bf16_flops",
        copies=len(gates),
        floor=1e-6,
    )


def _sorting() -> Iterator[Work]:
    for rows in (1, 8, 32, 64, 128, 341, 2048, 8192):
        ids = torch.rand(rows, E, device="cuda").argsort(1)[:, :TOP].int().contiguous()
        x = torch.randn(rows, K, device="cuda").to(BF16)
        m = wgmma_for(ids.numel(), E, K, 2048).m
        calls = {
            "sort": lambda i, ids=ids, m=m: sorted_plan(ids, E, m)[0],
            "sort, quantise": lambda i, x=x, ids=ids, m=m: planned(x, ids, E, m)[2],
        }
        for name, call in calls.items():
            yield Work(
                f"{name} pairs={rows * TOP}",
                "",
                call,
                _same(lambda ids=ids: torch.sort(ids.flatten(), stable=True).indices),
                bytes=rows * TOP * 8 + (rows * K * 3 if "," in name else 0),
                flops=0.0,
                copies=16,  # of one call: a graph of its own costs 6 us
                floor=0.0,
            )


V = 129280


def sampling(sweep: bool) -> Iterator[Work]:
    others = (SampleTile(1024, 4, 2048, 8), SampleTile(2048, 4), SampleTile(2048, 8))
    for rows in (1, 8, 32, 128):
        logits = torch.randn(rows, V, device="cuda") * 3
        draws: dict[str, Any] = {
            "temperature": torch.full((rows,), 0.8, device="cuda"),
            "seed": torch.randint(1 << 40, (rows,), device="cuda"),
            "index": torch.arange(rows, device="cuda"),
        }
        top_p = torch.full((rows,), 0.95, device="cuda")
        top_k = torch.full((rows,), 50, device="cuda")
        min_p = torch.full((rows,), 0.02, device="cuda")
        for name, inputs in (
            ("greedy", SampleInputs(greedy=True)),
            ("draw", SampleInputs(**draws)),
            ("min-p 0.02", SampleInputs(**draws, min_p=min_p)),
            ("top-p 0.95", SampleInputs(**draws, top_p=top_p)),
            ("top-k 50, top-p 0.95", SampleInputs(**draws, top_k=top_k, top_p=top_p)),
            ("hot, top-p 0.95", SampleInputs(**(draws | {"temperature": top_p * 4}), top_p=top_p)),
        ):
            tried = sweep and rows in (1, 128) and name != "min-p 0.02"
            for tile in (TILE, *(others if tried else ())):
                yield Work(
                    f"sample {name} m={rows}",
                    f"{tile.part}x{tile.warps} {tile.lanes}x{tile.row_warps}",
                    lambda i, x=logits, s=inputs, t=tile: sample(x, s, tile=t).tokens,
                    _same(lambda x=logits, s=inputs: sampler.sample(x, s).tokens),
                    bytes=rows * V * 4,
                    flops=0.0,
                    copies=4,  # of the same row, which the head has just written
                    floor=0.0,
                )


SECTIONS: dict[str, Callable[[bool], Iterator[Work]]] = {
    "indexer": indexing,
    "route": routing,
    "sample": sampling,
}
