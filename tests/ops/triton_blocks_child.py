"""Run by `test_triton_v4_blocks.py` in a process of its own: ``TRITON_INTERPRET`` binds at import.

Prints one JSON line for each run named in the arguments: its error relative to the truth (for bytes
and bits: how many are wrong).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from metainfer.formats import elements
from metainfer.kv.book.form import EntryForm, index_fp4, index_fp8, latent_fp8, latent_plain
from metainfer.kv.store.entries import EntryPages, StateRows, store
from metainfer.ops.case import generator, normal, poisoned
from metainfer.ops.common import hadamard
from metainfer.ops.compress import triton as compressor
from metainfer.ops.compress.tiles import Tile as CompressTile
from metainfer.ops.compress.tiles import each_for
from metainfer.ops.compress.triton import compress
from metainfer.ops.hyper import ref, triton_calls
from metainfer.ops.hyper.cases import mix_pre_cases
from metainfer.ops.hyper.tiles import LONG, Tile
from metainfer.ops.rope.tables import RopeSpec, cos_sin
from metainfer.ops.triton_entries import (
    _bfloat16,
    _e2m1,
    _e4m3,
    form_constants,
    mixed_by_hadamard,
    store_entry,
)

G = generator(13)


def off(mine: Tensor, truth: Tensor) -> float:
    gap = (mine.double() - truth).abs()
    return float(gap.max() / truth.abs().max()) if bool(torch.isfinite(gap).all()) else float("inf")


@triton.jit
def entries_kernel(
    values, data, slots, LANES: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, TAIL: tl.constexpr, SCALES: tl.constexpr, PAGE: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    t, lane = tl.program_id(0), tl.arange(0, LANES)
    slot = tl.load(slots + t)
    if slot >= 0:
        x = tl.load(values + t * D + lane, mask=lane < D, other=float("nan"))
        store_entry(data, slot, x, LANES, D, FORM, GROUP, TAIL, SCALES, PAGE, STRIDE)


@triton.jit
def hadamard_kernel(values, out, D: tl.constexpr):
    place = tl.program_id(0) * D + tl.arange(0, D)
    tl.store(out + place, mixed_by_hadamard(tl.load(values + place), D))


@triton.jit
def codes_kernel(values, eight, four, upper, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(values + at)
    tl.store(eight + at, _e4m3(x))
    tl.store(four + at, _e2m1(x).to(tl.uint8))
    tl.store(upper + at, _bfloat16(x))


def run_codes() -> float:
    """Every code of both grids, what lies halfway and next to it, and far out."""
    grids = [torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()]
    grids.append(elements.e2m1_decode(torch.arange(16, dtype=torch.uint8)))
    marks = torch.cat([g[g.isfinite()].sort().values for g in grids])
    marks = torch.cat((marks, (marks[1:] + marks[:-1]) / 2, normal(G, 64).float() * 2.0**-8))
    far = torch.tensor([464.0, 465.0, 480.0, 1e5, 3e38, 7.0, 1e-42, -0.0])
    near = [torch.nextafter(marks, torch.full_like(marks, to)) for to in (-1e9, 1e9)]
    x = torch.cat((marks, *near, far, -far))
    x = torch.cat((x, x.new_zeros(-len(x) % 256)))
    eight, four = (torch.empty(len(x), dtype=torch.uint8) for _ in range(2))
    upper = torch.empty(len(x), dtype=torch.uint16)
    codes_kernel[(len(x) // 256,)](x, eight, four, upper, 256)
    wrong = (eight != elements.e4m3_encode(x)).sum() + (four != elements.e2m1_encode(x)).sum()
    return float(wrong + (upper.view(torch.bfloat16) != x.bfloat16()).sum())


def hostile(rows: int, width: int) -> Tensor:
    """Noise of every size; ties of both grids, borders of scales, subnormals, NaN, infinity."""
    x = normal(G, rows, width).float() * torch.exp2(torch.randint(-24, 12, (rows, 1), generator=G))
    x[0] = 0
    x[1, ::2], x[1, 1::2] = 1e-30, -1e-42
    grid = torch.arange(width, dtype=torch.float32)
    x[2] = (grid % 64 + 0.5) / 64 * 448  # halves between codes
    x[3] = 448 * (1 + (grid - width // 2) * 2.0**-23)  # on both sides of a power of two
    x[4] = (grid % 25) * 0.25 - 3
    x[5] = 6 * (1 + (grid - width // 2) * 2.0**-23)
    x[6, 3], x[7, width - 1], x[8, 1] = float("nan"), float("inf"), float("-inf")
    x[9, 0] = 3e38
    x[10] = 448 * torch.exp2(-grid / 3)  # down to below the smallest code
    for row, edge in ((12, 448.0), (13, 6.0)):  # one step past a power of two times the largest
        x[row] = 0.5
        x[row, 5] = torch.nextafter(torch.tensor(edge), torch.tensor(1e3))
    return x


def entries(form: EntryForm) -> float:
    """Bytes that differ from the reference's; page 0 and skipped rows stay poison."""
    rows, page = 24, 5
    x = hostile(rows, form.width)
    slots = torch.randperm(8 * page, generator=G)[:rows] + page
    slots[11] = -1
    pages = []
    for _ in range(2):
        data = torch.full((9, form.page_bytes(page)), 0xFF, dtype=torch.uint8)
        pages.append(EntryPages(group=0, data=data, form=form, entries=page))
    lanes = triton.next_power_of_2(form.width)
    entries_kernel[(rows,)](x, pages[0].data, slots, lanes, form.width, *form_constants(pages[0]))
    store(pages[1], slots, x)
    wrong = pages[0].data != pages[1].data
    for row in (6, 7, 8, 9):  # where a group is not finite its scale is NaN, and codes may be any
        wrong &= _outside(pages[1], int(slots[row]))
    scales = _scales(pages[0]) != _scales(pages[1])
    return float(wrong.sum() + scales.sum())


def _outside(pages: EntryPages, slot: int) -> Tensor:
    """All bytes but the value bytes of the entry at `slot`."""
    kept = torch.ones_like(pages.data, dtype=torch.bool)
    each = form_constants(pages)
    width = pages.form.bytes - each[3]
    first = slot % pages.entries * width
    kept[slot // pages.entries, first : first + width] = False
    return kept


def _scales(pages: EntryPages) -> Tensor:
    each = form_constants(pages)
    return pages.data[:, pages.entries * (pages.form.bytes - each[3]) :]


def run_hadamard() -> float:
    x = normal(G, 5, 128).float()
    found = torch.empty_like(x)
    hadamard_kernel[(5,)](x, found, 128)
    return off(found, hadamard(x.double()))


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Programs of a grid run in another order."""
    builder, order = interpreter.interpreter_builder, random.Random(seed)
    plain = type(builder).set_grid_idx
    found: dict[int, list[int]] = {}

    def moved(x: int, y: int, z: int) -> None:
        count = builder.grid_dim[0]
        if count not in found:
            found[count] = order.sample(range(count), count)
        plain(builder, found[count][x], y, z)

    builder.set_grid_idx = moved
    try:
        yield
    finally:
        del builder.set_grid_idx


def compressed(
    overlap: bool, cuts: list[int], seed: int = 0, tile: CompressTile | None = None
) -> tuple[Tensor, Tensor]:
    """(entries, the last `slots` rows of the ring) of one sequence of 83 tokens cut at `cuts`."""
    g, d, ratio, total = generator(5), 16, 4, 83
    halves = 1 + overlap
    length = ratio * halves + 3
    kv, gate = (normal(g, total, 2 * halves * d).float().chunk(2, 1) for _ in range(2))
    kv, gate = kv[0], gate[1]  # slices of wider rows
    ape, weight = normal(g, ratio, halves * d).float(), (normal(g, d) + 1).float()
    table = cos_sin(RopeSpec(rotated=8), total)
    ring = torch.full((3, 2, length, halves * d), float("nan"))
    form = latent_plain(d, 8, "float32")
    pages = EntryPages(0, torch.full((8, 4, d), float("nan")), form, 4)
    with shuffled(seed), poisoned():
        for first, last in itertools.pairwise([0, *cuts, total]):
            at = torch.arange(first, last)
            slots = torch.where((at + 1) % ratio == 0, 4 + at // ratio, -1)
            compress(
                kv[first:last], gate[first:last], ape, weight, table, StateRows(0, ring),
                torch.tensor([1]), pages, slots, torch.tensor([0, last - first]).int(),
                torch.tensor([last]).int(), ratio=ratio, overlap=overlap, eps=1e-6,
                tile=tile,
            )  # fmt: skip
    last = torch.arange(total - ratio * halves + 1, total)
    assert ring[[0, 2]].isnan().all() and pages.data[:1].isnan().all()
    return pages.data.view(-1, d)[4 : 4 + total // ratio], ring[1][:, last % length]


def run_compress_cuts() -> float:
    """Any cut, in any order of programs, whole or in slices of channels: the same entries and the
    same ring, bit for bit."""
    wrong = 0
    for overlap in (True, False):
        whole = compressed(overlap, [])
        assert not whole[0].isnan().any() and not whole[1].isnan().any()
        draw = random.Random(7)
        for seed in range(1, 4):
            cuts = sorted(draw.sample(range(1, 83), draw.choice([1, 2, 3, 6])))
            tile = CompressTile(4, 4 * (1 + overlap), 4) if seed > 1 else None
            compressor.each_for = (lambda rows, slices: 2) if seed > 2 else each_for
            found = compressed(overlap, cuts, seed, tile)
            compressor.each_for = each_for
            wrong += sum(int((a != b).sum()) for a, b in zip(found, whole, strict=True))
    return float(wrong)


def hyper(tile: Tile, rows: int) -> float:
    """A case of `rows` tokens in tiles of another size."""
    case = next(case for case in mix_pre_cases(3) if case.shape["rows"] == rows)
    args = tuple(a.float() for a in case.args)
    truth = ref.hyper_mix_pre(*(a.double() for a in args), **case.kwargs)
    before = triton_calls.tile_for
    triton_calls.tile_for = lambda rows: tile
    try:
        with poisoned():
            found = triton_calls.hyper_mix_pre(*args, **case.kwargs)
    finally:
        triton_calls.tile_for = before
    return max(off(a, b) for a, b in zip(found, truth, strict=True))


RUNS: dict[str, Callable[[], float]] = {
    "latent-fp8-bytes": lambda: entries(latent_fp8(88, 24)),
    "index-fp8-bytes": lambda: entries(index_fp8(64)),
    "index-fp4-bytes": lambda: entries(index_fp4(128)),
    "codes": run_codes,
    "hadamard": run_hadamard,
    "compress-cuts": run_compress_cuts,
    "hyper-parts": lambda: hyper(Tile(d=8, down=1, across=4, splits=4, programs=1), 7),
    "hyper-long": lambda: hyper(LONG, 17),
}


def main() -> None:
    warnings.filterwarnings("ignore")
    for name in sys.argv[1:]:
        print(json.dumps({"name": name, "error": RUNS[name]()}), flush=True)


if __name__ == "__main__":
    main()
