"""Run by `test_triton_v4_kernels.py` in a process of its own: ``TRITON_INTERPRET`` binds at import.

Prints one JSON line for each run named in the arguments: its error relative to the truth (for whole
numbers: how many are wrong).
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from metainfer.formats import elements
from metainfer.formats.activation import activation_fp8
from metainfer.formats.block_codecs import BlockTensor, decode, encode
from metainfer.formats.blocks import FORMATS
from metainfer.kv.book.form import plain
from metainfer.kv.store.entries import EntryPages, gather, locate
from metainfer.ops.attn_sparse import cases as attention_cases
from metainfer.ops.attn_sparse.cases import LAYOUTS, Layout, _draw
from metainfer.ops.attn_sparse.ref import attn_sparse as reference
from metainfer.ops.attn_sparse.tiles import Tile as AttnTile
from metainfer.ops.attn_sparse.tiles import decodes_first
from metainfer.ops.attn_sparse.triton_calls import attn_sparse, attn_sparse_scaled, decoded
from metainfer.ops.case import generator, normal, poisoned
from metainfer.ops.case_caches import held
from metainfer.ops.linear.fp8 import chunk, quantise, stream
from metainfer.ops.linear.tiles import ChunkTile, StreamTile
from metainfer.ops.moe_experts import mxfp4
from metainfer.ops.moe_experts.plan import planned, sorted_bounds, sorted_plan
from metainfer.ops.moe_experts.rounded import Order, Rounded
from metainfer.ops.moe_experts.tiles import Tile
from metainfer.ops.moe_experts.triton_combine import combine_kernel
from metainfer.ops.rope.tables import RopeSpec, cos_sin
from metainfer.ops.triton_e4m3 import e4m3_rounded, e4m3_values

G = generator(11)


def grid(*shape: int) -> Tensor:
    """Noise that e4m3 with a power-of-two scale per 128 channels holds exactly."""
    return activation_fp8(normal(G, *shape).float())


def off(mine: Tensor, truth: Tensor) -> float:
    gap = (mine.double() - truth).abs()
    return float(gap.max() / truth.abs().max()) if bool(torch.isfinite(gap).all()) else float("inf")


def fp8() -> tuple[Tensor, BlockTensor, Tensor]:
    """Every block has a size of its own: a stale or foreign scale shows."""
    sizes = torch.exp2(torch.arange(8.0).view(2, 4) * 2 - 7).repeat_interleave(128, 0)[:200]
    values = normal(G, 200, 512) * sizes.repeat_interleave(128, 1)
    x, weight = grid(5, 512), encode(values, FORMATS["fp8_128"])
    return x, weight, x.double() @ decode(weight, torch.float64).T


def run_stream(splits: int = 1) -> float:
    x, weight, truth = fp8()
    data = weight.data.view(torch.float8_e4m3fn)
    for _ in range(2):  # counters come back to zero
        with poisoned():
            found = stream(x, data, weight.scale, tile=StreamTile(64, 4, 2), splits=splits)
    return off(found, truth)


def run_chunk() -> float:
    x, weight, truth = fp8()
    data = weight.data.view(torch.float8_e4m3fn)
    with poisoned():
        tile = ChunkTile(16, 64, 4, 2)
        return off(chunk(*quantise(x), data, weight.scale, dtype=torch.float32, tile=tile), truth)


def run_quantise() -> float:
    x = grid(3, 256)
    q, scales = quantise(x)
    back = q.double().view(3, 2, 128) * scales.T.double().unsqueeze(-1)
    mixed, other = quantise(x, mixed=True)
    place = torch.arange(128)
    order = place // 4 % 4 * 32 + place // 16 * 4 + place % 4
    again = mixed.double().view(3, 2, 128)[..., order] * other.double().unsqueeze(-1)
    return max(off(back.flatten(1), x.double()), off(again.flatten(1), x.double()))


def run_quantise_nan() -> float:
    x = grid(4, 128)
    x[1, 7], x[2, 9] = float("nan"), float("inf")
    scales = quantise(x)[1][0]
    return float(scales.isnan().tolist() != [False, True, True, False])


@triton.jit
def e4m3_kernel(codes, values, x, rounded):
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(values + at, e4m3_values(tl.load(codes + at)))
    tl.store(rounded + at, e4m3_rounded(tl.load(x + at)))


def run_e4m3() -> float:
    """Every byte; every point of the grid, half way between each two, and noise over all sizes."""
    codes = torch.arange(4096).to(torch.uint8)
    points = elements.e4m3_decode(codes[:256])
    known = points[~points.isnan()].sort().values
    sizes = torch.exp2(torch.randint(-14, 8, (4096,), generator=G).float())
    x = (torch.randn(4096, generator=G) * sizes).clamp(-448, 448)
    x[: 2 * len(known) - 1] = torch.cat((known, (known[1:] + known[:-1]) / 2))
    x[-1] = float("nan")
    values, rounded = torch.full((4096,), -7.0), torch.full((4096,), -7.0)
    e4m3_kernel[(16,)](codes, values, x, rounded)
    truth = elements.e4m3_decode(elements.e4m3_encode(x))
    same = torch.equal(values[:256].nan_to_num(7), points.nan_to_num(7))
    return float(not same) + float(not torch.equal(rounded.nan_to_num(7), truth.nan_to_num(7)))


def rough(*shape: int) -> Tensor:
    """Noise between the grid's points: only rounding by integers gets it right here."""
    return normal(G, *shape).float() * 3


def run_quantise_wide() -> float:
    """Also where a value lies half way between two points, and below the smallest binade."""
    x = rough(5, 384)
    x[0, :128] = torch.tensor([17.0, 19.0, 448.0, 2**-7.5, 0.0, -1.1]).repeat(22)[:128]
    q, scales = quantise(x, wide=True)
    back = (q.double().view(5, 3, 128) * scales.T.double().unsqueeze(-1)).flatten(1)
    truth = activation_fp8(x).double()
    x[2, 7] = float("nan")
    blind = quantise(x, wide=True)[1][0]
    lost = float(blind.isnan().tolist() != [False, False, True, False, False])
    return max(off(back, truth), lost)


def run_linear_wide() -> float:
    """Both forms in the wide type on values that must be rounded, the weight as bytes."""
    _, weight, _ = fp8()
    x = rough(5, 512)
    truth = activation_fp8(x).double() @ decode(weight, torch.float64).T
    with poisoned():
        few = stream(x, weight.data, weight.scale, tile=StreamTile(64, 4, 2), wide=True)
        many = chunk(
            *quantise(x, wide=True), weight.data, weight.scale, dtype=torch.float32,
            tile=ChunkTile(16, 64, 4, 2), wide=True,
        )  # fmt: skip
    return max(off(few, truth), off(many, truth))


def choose(tokens: int, k: int, count: int) -> Tensor:
    ids = torch.stack([torch.randperm(count, generator=G)[:k] for _ in range(tokens)]).int()
    if tokens > 4:
        ids[2], ids[4, 1] = -1, -1
    return ids


def judged(order: Tensor, table: Tensor, ids: Tensor, m: int) -> int:
    """How many pairs a plan misplaces: experts in turn, their pairs as they come, blocks of m."""
    flat = ids.flatten().tolist()
    held = sorted((expert, i) for i, expert in enumerate(flat) if expert >= 0)
    wrong = sum(i != place for (_, i), place in zip(held, order.tolist(), strict=False))
    cut = []
    for expert in sorted({expert for expert, _ in held}):
        mine = [place for place, (e, _) in enumerate(held) if e == expert]
        cut += [[expert, mine[j], min(m, len(mine) - j)] for j in range(0, len(mine), m)]
    found = table.tolist()
    wrong += sum(mine != theirs for mine, theirs in zip(cut, found, strict=False))
    return wrong + max(len(cut) - len(found), 0) + sum(row[2] != 0 for row in found[len(cut) :])


def run_plan() -> float:
    """One launch quantises as `quantise` and sorts: more pairs than one program places, tokens
    that fill no block, a sliced input."""
    wrong = 0
    for tokens, k, count, m in ((5, 3, 4, 8), (7, 6, 9, 2), (1, 6, 256, 8), (22, 6, 7, 8)):
        ids, x = choose(tokens, k, count), grid(tokens, 384)[:, 128:]
        with poisoned():
            q, scales, order, table = planned(x, ids, count, m)
        same, factor = quantise(x, mixed=True)
        wrong += judged(order, table, ids, m) + int(not torch.equal(scales, factor))
        wrong += int(not torch.equal(q.view(torch.uint8), same.view(torch.uint8)))
    return float(wrong)


def run_sorted_plan() -> float:
    wrong = 0
    for tokens, k, count, m in (
        (50, 3, 4, 8), (70, 6, 9, 16), (1, 6, 256, 8), (200, 6, 7, 128), (60, 6, 300, 2),
        (700, 3, 7, 64),  # counted by a launch of their own
    ):  # fmt: skip
        ids = choose(tokens, k, count)
        if tokens == 50:
            ids[:, 0] = 3  # one expert has most
        with poisoned():
            wrong += judged(*sorted_plan(ids, count, m), ids, m)
    ids = choose(3, 3, 4).fill_(-1)
    with poisoned():
        wrong += judged(*sorted_plan(ids, 4, 8), ids, 8)
    return float(wrong)


def run_sorted_bounds() -> float:
    """The portable form's borders, by both ways of counting."""
    wrong = 0
    for tokens, k, count, m in ((50, 3, 40, 8), (700, 3, 7, 64)):
        ids = choose(tokens, k, count)
        with poisoned():
            order, tiles, bounds = sorted_bounds(ids, count, m)
        flat = ids.flatten()
        truth = [i for e in range(count) for i in (flat == e).nonzero().flatten().tolist()]
        sizes = [int((flat == e).sum()) for e in range(count)]
        wrong += order[: len(truth)].tolist() != truth
        wrong += bounds.tolist() != [0, *accumulate(sizes)]
        wrong += tiles.tolist() != [0, *accumulate(-(-size // m) for size in sizes)]
    return float(wrong)


def run_combine() -> float:
    """Choices in their order, nobody's left out, rounded before the shared expert is added."""
    ids, (d, block) = choose(7, 3, 5), (200, 128)
    y, shared = rough(21, d), rough(7, d).half()
    wrong = 0
    for beside in (None, shared):
        with poisoned():
            out = torch.empty(7, d, dtype=torch.float16)
        combine_kernel[(7, 2)](y, ids, beside, out, d, 3, block, beside is not None)
        total = torch.zeros(7, d)
        for j in range(3):
            total += torch.where((ids[:, j] >= 0)[:, None], y[j::3], 0.0)
        truth = total.half() if beside is None else total.half() + beside
        wrong += int((out != truth).sum())
    return float(wrong)


E, D, WIDTH, LIMIT = 4, 256, 128, 1.0


def experts(chunked: bool, wide: bool = False) -> tuple[Tensor, Tensor]:
    """(result, truth) of one expert layer; the truth's hidden values are rounded if `wide`."""
    generator_state = G.get_state()
    x, ids = rough(7, D) if wide else grid(7, D), choose(7, 2, E)
    routes = torch.rand(7, 2, generator=G)
    up = encode(normal(G, E * 2 * WIDTH, D) * D**-0.5, FORMATS["mxfp4"])
    down = encode(normal(G, E * D, WIDTH) * WIDTH**-0.5, FORMATS["mxfp4"])
    G.set_state(generator_state)
    packed = [mxfp4.prepare(part.data, part.scale) for part in (up, down)]
    with poisoned():
        found = mxfp4.experts(
            x, ids, routes, *packed, experts=E, limit=LIMIT, tile=Tile(64, 16, 4, 2),
            chunked=chunked, wide=wide,
        )  # fmt: skip
    w13, w2 = decode(up, torch.float64), decode(down, torch.float64)
    truth = torch.zeros(7, D, dtype=torch.float64)
    for token, slot in (ids >= 0).nonzero().tolist():
        e = int(ids[token, slot])
        values = activation_fp8(x[token : token + 1])[0] if wide else x[token]
        both = w13.view(E, 2 * WIDTH, D)[e] @ values.double()
        gate, lift = both[:WIDTH].clamp(max=LIMIT), both[WIDTH:].clamp(-LIMIT, LIMIT)
        hidden = F.silu(gate) * lift * routes[token, slot].double()
        if wide:
            hidden = activation_fp8(hidden[None].float())[0].double()
        truth[token] += w2.view(E, D, WIDTH)[e] @ hidden
    return found, truth


def run_experts_hidden() -> float:
    """Rounding hidden values costs a few per cent; anything else would cost more."""
    found, truth = experts(chunked=False)
    untouched = float(found[2].abs().max())
    return max(float((found - truth).norm() / truth.norm()) / 0.1 - 1, 0.0) + untouched


def run_experts_forms() -> float:
    few, many = experts(chunked=False)[0], experts(chunked=True)[0]
    return off(few, many.double())


def run_experts_rounded() -> float:
    """Rows that come rounded: not a bit differs, in either form; read back they are the rows."""
    up, down = (
        mxfp4.prepare(part.data, part.scale)
        for part in (
            encode(normal(G, E * 2 * WIDTH, D) * D**-0.5, FORMATS["mxfp4"]),
            encode(normal(G, E * D, WIDTH) * WIDTH**-0.5, FORMATS["mxfp4"]),
        )
    )
    x, ids, routes = grid(7, D), choose(7, 2, E), torch.rand(7, 2, generator=G)
    sent = Rounded(*quantise(x, mixed=True), x.dtype, order=Order.MIXED)
    wrong = int((sent.read() != x).sum())
    for chunked in (False, True):
        with poisoned():
            found, given = (
                mxfp4.experts(
                    rows, ids, routes, up, down, experts=E, tile=Tile(64, 16, 4, 2),
                    chunked=chunked,
                )
                for rows in (x, sent)
            )  # fmt: skip
        wrong += int((found != given).sum()) + int(not found.abs().sum() > 0)
    (*mine, _, table), (*theirs, _, same) = (planned(rows, ids, E, 4) for rows in (x, sent))
    for one, other in zip(mine, theirs, strict=True):
        wrong += int((one.float() != other.float()).sum())
    live = table[:, 2] > 0
    return float(wrong + int((table[live] != same[live]).sum() + (same[~live, 2] != 0).sum()))


def run_experts_wide() -> float:
    """What rounding decides differently after float32 sums is a step of one hidden value."""
    worst = 0.0
    for chunked in (False, True):
        found, truth = experts(chunked, wide=True)
        worst = max(worst, off(found, truth))
    return worst


def run_prepare() -> float:
    """Spans of 11 are exact, 12 are not; blocks of zeros do not count; references are the rows'."""
    data = torch.full((3, 64), 0x22, dtype=torch.uint8)
    scale = torch.full((3, 4), 120, dtype=torch.uint8)
    scale[1, 2] = 109
    scale[2, 0], data[2, :16] = 1, 0
    fine = mxfp4.prepare(data, scale)
    scale[1, 2] = 108
    return float(
        not fine.eight or fine.refs.tolist() != [120] * 3 or mxfp4.prepare(data, scale).eight
    )


TILE = AttnTile(16, 16, 4, 2)


def attention(layout: Layout, splits: int, tile: AttnTile = TILE) -> float:
    drawn = _draw(layout, G)
    d, ratio = layout.d, layout.ratio
    per = layout.page // ratio if ratio else 1
    form = plain("latent@1", d, "float32", tail=layout.rotated)
    local = EntryPages(0, drawn.tokens.float().view(-1, layout.page, d), form, layout.page)
    entries = EntryPages(0, drawn.entries.float().view(-1, per, d), form, per) if ratio else None
    queries = torch.tensor([0, *(n for n, _ in layout.sequences)]).cumsum(0).int()
    rows = int(queries[-1])
    args = (
        local, drawn.local_table, entries, drawn.entry_table if ratio else None,
        drawn.picks if ratio and layout.top_k else None,
        (normal(G, layout.hq) + layout.sink).float(),
        cos_sin(RopeSpec(rotated=layout.rotated), max(c for _, c in layout.sequences)),
        drawn.positions, queries, torch.tensor([c for _, c in layout.sequences]).int(),
    )  # fmt: skip
    q = normal(G, rows + layout.padding, layout.hq, d).float()
    options = {"scale": d**-0.5, "window": layout.window, "ratio": ratio}
    with poisoned():
        found = attn_sparse(q, *args, **options, tile=tile, splits=splits)
    return off(found[:rows], reference(q.double(), *args, **options)[:rows].double())


def run_attention(splits: int = 1) -> float:
    names = ("first-token", "decode-borders", "decode-all", "decode-window-only",
             "decode-idle-padded", "verify", "chunks", "strong-sink")  # fmt: skip
    return max(attention(layout, splits) for layout in LAYOUTS if layout.name in names)


def run_attention_sliced() -> float:
    """Channels in eight slices, of 16 at least: a product takes no fewer."""
    tile = AttnTile(16, 16, 8, 5, sliced=True)
    layouts = [
        replace(layout, d=128, hq=18)
        for layout in LAYOUTS
        if layout.name in ("decode-borders", "decode-idle-padded", "decode-window-only")
    ]
    return max(attention(layout, splits, tile) for layout in layouts for splits in (1, 4))


def scaled_cases() -> list[tuple[Layout, tuple, dict[str, float]]]:
    """(layout, arguments with ``latent-fp8@1`` caches in float32, options) of the chunks that are
    decoded first."""
    found = []
    for at, layout in enumerate(LAYOUTS):
        if layout.name.startswith("chunk-decoded"):
            case = attention_cases.build(layout, 5 + at)
            args = held(case.args, {"kv": "latent-fp8@1"}, "float32")
            found.append((layout, args, case.kwargs))
    return found


def run_decoded_pages() -> float:
    """What a query can read is decoded, to the bit; no two places share a page; the rest is -1."""
    wrong = 0.0
    for layout, args, _ in scaled_cases():
        local, local_table, entries, entry_table = args[1:5]
        span = args[8:11]
        parts = [(local, local_table, {"window": layout.window})]
        if entries is not None:
            parts.append((entries, entry_table, {"ratio": layout.ratio}))
        for pages, table, options in parts:
            with poisoned():
                mine, mine_table = decoded(
                    pages, table, *span, torch.float32, **options, native=layout.ratio != 4
                )
            taken = []
            for s, (n, context) in enumerate(layout.sequences):
                low, high = max(0, context - n - layout.window + 1), context
                if "ratio" in options:
                    low, high = 0, context // layout.ratio
                numbers = torch.arange(low, high if n else low)
                found = gather(mine, locate(mine_table[s], mine.entries, numbers))
                truth = gather(pages, locate(table[s], pages.entries, numbers))
                known = ~truth.isnan().any(dim=1)  # others were never written
                wrong += float(not torch.equal(found[known], truth[known]))
                taken += mine_table[s][mine_table[s] >= 0].tolist()
                needed = set((numbers // pages.entries).tolist())
                wrong += float(
                    {p for p in range(table.shape[1]) if mine_table[s, p] >= 0} != needed
                )
            wrong += float(len(set(taken)) != len(taken) or max(taken) >= len(mine.data))
    return wrong


def run_decoded_attention() -> float:
    worst = 0.0
    for layout, args, options in scaled_cases():
        rows, kept = args[0].shape[0], args[4].shape[1] * args[3].entries if args[3] else 0
        listed = layout.top_k or kept
        sequences = len(layout.sequences)
        assert decodes_first(rows, sequences, layout.window, listed, kept, layout.d)
        truth = reference(args[0].double(), *args[1:], **options)
        for native in (True, False):
            with poisoned():
                found = attn_sparse_scaled(*args, **options, native=native)
            worst = max(worst, off(found, truth.double()))
    return worst


def run_scaled_attention() -> float:
    """Scaled latents decoded by every query that reads them."""
    worst = 0.0
    for place, native, splits in ((2, True, 1), (0, False, 2)):
        _, args, options = scaled_cases()[place]
        truth = reference(args[0].double(), *args[1:], **options)
        with poisoned():
            found = attn_sparse(
                *args, **options, native=native, tile=AttnTile(16, 16, 4, 2), splits=splits
            )
        worst = max(worst, off(found, truth.double()))
    return worst


RUNS: dict[str, Callable[[], float]] = {
    "stream": run_stream,
    "stream-splits": lambda: run_stream(2),
    "chunk": run_chunk,
    "quantise": run_quantise,
    "quantise-nan": run_quantise_nan,
    "plan": run_plan,
    "sorted-plan": run_sorted_plan,
    "sorted-bounds": run_sorted_bounds,
    "combine": run_combine,
    "experts-hidden": run_experts_hidden,
    "experts-forms": run_experts_forms,
    "e4m3": run_e4m3,
    "quantise-wide": run_quantise_wide,
    "linear-wide": run_linear_wide,
    "experts-rounded": run_experts_rounded,
    "experts-wide": run_experts_wide,
    "prepare": run_prepare,
    "attention": run_attention,
    "attention-splits": lambda: run_attention(4),
    "attention-sliced": run_attention_sliced,
    "decoded-pages": run_decoded_pages,
    "decoded-attention": run_decoded_attention,
    "scaled-attention": run_scaled_attention,
}


def main() -> None:
    warnings.filterwarnings("ignore")
    for name in sys.argv[1:]:
        print(json.dumps({"name": name, "error": RUNS[name]()}), flush=True)


if __name__ == "__main__":
    main()
