"""Run by `test_triton_products.py` in a process of its own: ``TRITON_INTERPRET`` binds at import.

Prints one JSON line for each run: its error relative to the truth.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import product

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from metainfer.formats.activation import activation_fp8
from metainfer.formats.block_codecs import BlockTensor, decode, encode
from metainfer.formats.blocks import FORMATS
from metainfer.ops.case import generator, normal, poisoned
from metainfer.ops.linear.fp8 import chunk, quantise
from metainfer.ops.linear.tiles import ChunkTile
from metainfer.ops.out_group.fp8 import decoded, grouped
from metainfer.ops.out_group.tiles import GroupTile

G = generator(23)


def off(mine: Tensor, truth: Tensor) -> float:
    gap = (mine.double() - truth).abs()
    return float(gap.max() / truth.abs().max()) if bool(torch.isfinite(gap).all()) else float("inf")


def sloped(n: int, k: int, scheme: str) -> tuple[BlockTensor, Tensor]:
    """(weight, its values [n, k] float64): every block has a size of its own."""
    blocks = -(-n // 128), k // 128
    sizes = torch.exp2(torch.arange(float(blocks[0] * blocks[1])).view(blocks) % 7 * 2 - 7)
    wide = sizes.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    weight = encode(normal(G, n, k) * wide, FORMATS[scheme])
    return weight, decode(weight, torch.float64)


def run_chunk_parts() -> float:
    """K in parts, several tiles of tokens and of rows, twice: arrivals come back to zero."""
    weight, values = sloped(136, 512, "fp8_128")
    x = activation_fp8(normal(G, 17, 512).float())
    truth, data = x.double() @ values.T, weight.data.view(torch.float8_e4m3fn)
    found, first = [], None
    for splits in (2, 2, 4):
        with poisoned():
            mine = chunk(
                *quantise(x), data, weight.scale, dtype=torch.float32,
                tile=ChunkTile(16, 64, 4, 2), splits=splits,
            )  # fmt: skip
        found.append(off(mine, truth))
        if splits == 2:
            first = mine if first is None else first
            found.append(0.0 if torch.equal(mine, first) else 1.0)
    return max(found)


def run_quantise_many() -> float:
    """As many tokens as make programs of several blocks: K of 3 and 8 blocks, rows to spare;
    in the order that packed FP4 unpacks to, and not."""
    worst, place = 0.0, torch.arange(128)
    order = place // 4 % 4 * 32 + place // 16 * 4 + place % 4
    for k, mixed in ((384, False), (1024, True)):
        x = activation_fp8(normal(G, 1027, k).float())
        with poisoned():
            q, scales = quantise(x, mixed=mixed)
        values = q.double().view(1027, -1, 128)
        values = values[..., order] if mixed else values
        back = values * (scales if mixed else scales.T).double()[..., None]
        worst = max(worst, off(back.flatten(1), x.double()))
    return worst


def run_grouped() -> float:
    """Tokens that fill no tile, whole and in parts, both scales, the weight as its type and as
    bytes; for many tokens the matrix decoded."""
    groups, rows, k, worst = 2, 128, 512, 0.0
    tiles = (
        (5, GroupTile(16, 64, 4, 2), 2),
        (16, GroupTile(16, 128, 4, 2), 1),
        (20, GroupTile(32, 64, 4, 2), 4),
    )
    for scheme, (tokens, tile, splits) in product(("fp8_128", "fp8_128_f32"), tiles):
        weight, values = sloped(groups * rows, k, scheme)
        o = normal(G, tokens, groups * k).float()
        truth = torch.einsum(
            "tgk,grk->tgr", o.double().view(-1, groups, k), values.view(groups, rows, k)
        ).flatten(1)
        for data in (weight.data, weight.data.view(torch.float8_e4m3fn)):
            with poisoned():
                mine = grouped(o, data, weight.scale, groups=groups, tile=tile, splits=splits)
            worst = max(worst, off(mine, truth))
    with poisoned():
        whole = decoded(weight.data, weight.scale, torch.float32)
    return max(worst, float(not torch.equal(whole.double(), values)))


RUNS: dict[str, Callable[[], float]] = {
    "chunk-parts": run_chunk_parts,
    "quantise-many": run_quantise_many,
    "grouped": run_grouped,
}


if __name__ == "__main__":
    for name, run in RUNS.items():
        print(json.dumps({"name": name, "error": run()}), flush=True)
