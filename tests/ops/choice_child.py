"""Run by `test_triton_choices.py` in a process of its own: ``TRITON_INTERPRET`` binds at import.

Prints one JSON line for each run named in the arguments: how many numbers are wrong.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from metainfer.kv.book.form import EntryForm, index_fp4, index_fp8, index_plain
from metainfer.kv.store.entries import EntryPages, store
from metainfer.ops.case import generator, integers, poisoned
from metainfer.ops.indexer.ref import index_query as query_reference
from metainfer.ops.indexer.ref import index_select as reference
from metainfer.ops.indexer.tiles import STREAM, WIDE_SCORE
from metainfer.ops.indexer.triton_calls import index_query, index_select
from metainfer.ops.moe_route import ref as router
from metainfer.ops.moe_route.tiles import MANY, SOME, WHOLE, Tile
from metainfer.ops.moe_route.triton_calls import moe_route, moe_route_hash
from metainfer.ops.sample import ref as sampler
from metainfer.ops.sample.draw import uniform
from metainfer.ops.sample.inputs import SampleInputs
from metainfer.ops.sample.tiles import TILE
from metainfer.ops.sample.tiles import Tile as SampleTile
from metainfer.ops.sample.triton_calls import sample

G = generator(23)
D, HEADS = 16, 2


def exact(steps: int, *shape: int) -> Tensor:
    """Small multiples of 1/4: scores are exact whatever the order of sums."""
    return (integers(G, 2 * steps + 1, *shape) - steps).float() / 4


def filed(keys: list[Tensor], form: EntryForm, entries: int = 16) -> tuple[EntryPages, Tensor]:
    """Each sequence's keys in pages of its own, shuffled; what nobody wrote is NaN."""
    d = keys[0].shape[1]
    needed = [-(-len(k) // entries) + 1 for k in keys]
    order = (torch.randperm(sum(needed), generator=G) + 1).int()
    table = torch.full((len(keys), max(needed)), -1, dtype=torch.int32)
    if form.scale == "none":
        data = torch.full((sum(needed) + 1, entries, d), torch.nan)
    else:
        data = torch.full((sum(needed) + 1, form.page_bytes(entries)), 0xFF, dtype=torch.uint8)
    pages, begin = EntryPages(0, data, form, entries), 0
    for s, own in enumerate(keys):
        table[s, : needed[s]] = order[begin : begin + needed[s]]
        begin += needed[s]
        w = torch.arange(len(own))
        store(pages, table[s][w // entries].long() * entries + w % entries, own)
    return pages, table


def wrong(
    keys: list[Tensor], queries: list[int], top_k: int, *, ratio: int = 1, padding: int = 0,
    q: Tensor | None = None, g: Tensor | None = None, form: EntryForm | None = None,
    **cut: Any,
) -> int:  # fmt: skip
    """Rows that differ from the reference: the last `queries` tokens of each sequence ask."""
    form = form or index_plain(D, "float32")
    rows = sum(queries) + padding
    q = exact(3, rows, HEADS, D) if q is None else q
    g = exact(4, rows, HEADS) if g is None else g
    pages, table = filed(keys, form)
    contexts = [len(k) * ratio for k in keys]
    spans = [torch.arange(c - n, c) for c, n in zip(contexts, queries, strict=True)]
    args = (
        q, g, pages, table, torch.cat([*spans, torch.zeros(padding, dtype=torch.int64)]),
        torch.tensor([0, *queries]).cumsum(0).int(), torch.tensor(contexts).int(),
    )  # fmt: skip
    options = {"ratio": ratio, "top_k": top_k, "scale": 0.5}
    with poisoned():
        found = index_select(*args, **options, **cut)
    return int((found != reference(*args, **options)).any(dim=1).sum())


def run_lengths() -> int:
    """Rows next to every border of k: L in 1, k - 1, k, k + 1, 4 k + 1, and one group more."""
    count = 0
    for k in (1, 40):
        lengths = sorted({1, max(k - 1, 1), k, k + 1, 4 * k + 1, 32 * k + 1, 33 * k})
        count += wrong([exact(3, n, D) for n in lengths], [1] * len(lengths), k)
    return count


def run_widths() -> int:
    """The widths that models have, over as many entries as make groups matter."""
    return sum(
        wrong([exact(3, n, D)], [1], k) for k, n in ((512, 17000), (1024, 4097), (2048, 2049))
    )


def run_ties() -> int:
    """All equal; two values; equal to the left and right of a group's edge; zeros of both signs."""
    count = 0
    for values in (1, 2, 3):
        keys = exact(3, values, D)[integers(G, values, 700)]
        count += wrong([keys, keys[:650]], [2, 1], 7)
    still = torch.zeros(3, HEADS, D)
    count += wrong([exact(3, 600, D), exact(3, 300, D)], [2, 1], 9, q=still)
    # relu shuts all entries off: 0 * negative is -0, 0 * positive +0
    # a score that is so little below zero that it rounds to -0, which equals 0
    q, g = torch.zeros(1, HEADS, D), torch.tensor([[-0.5, 0.5]])
    keys = torch.zeros(300, D)
    q[0, :, 0], keys[::3, 0] = torch.tensor([2.0**-74, -(2.0**-74)]), 2.0**-74
    count += wrong([keys], [1], 9, q=q, g=g)
    return count


def run_special() -> int:
    """NaN before infinity before numbers; rows of -infinity alone."""
    keys = exact(3, 400, D).abs() + 0.25
    keys[::7, 0] = torch.inf
    keys[5::11, 3] = torch.nan
    keys[3::29, 1], keys[3::29, 2] = torch.inf, -torch.inf  # NaN of the other sign on some hosts
    q, g = exact(3, 4, HEADS, D).abs() + 0.25, exact(4, 4, HEADS).abs() + 0.25
    g[2:] = -torch.inf
    return wrong([keys, keys[:390]], [2, 2], 70, q=q, g=g)


def run_forms() -> int:
    """Every form, pages across a tile's edge, 3 heads padded to 16."""
    count = 0
    for form in (index_plain(D, "float32"), index_fp8(D), index_fp4(D)):
        # 0 and one size an entry: what a form rounds, it rounds alike
        keys = exact(1, 200, D) * 7 * torch.exp2(integers(G, 4, 200, 1).float())
        q, g = exact(3, 3, 3, D), exact(4, 3, 3)
        count += wrong([keys, keys[:170]], [2, 1], 20, q=q, g=g, form=form)
    return count


def run_queries() -> int:
    """Sizes on every border of a scale or a step, nothing, NaN, infinity; heads of two blocks."""
    count = 0
    q = torch.zeros(9, 9, D)
    for row in range(6):  # one channel is mixed into all: 6 and its neighbours times a power of two
        q[row, :, row] = 24 * 2.0 ** (row - 3)
        q[row, 3] *= 1 + 2.0**-20
        q[row, 5] *= 1 - 2.0**-20
    q[6, 2, 1], q[7, 1, 1], q[7, 2, 1] = torch.nan, torch.inf, -torch.inf
    positions = torch.arange(9)
    still = torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(9, 1)
    for form in (index_plain(D, "float32"), index_fp8(D), index_fp4(D)):
        own = q if form.scale != "none" else q[:6]
        with poisoned():
            found = index_query(own, positions[: len(own)], still, form)
        wanted = query_reference(own, positions[: len(own)], still, form)
        off = ~torch.isclose(found, wanted, rtol=0, atol=0, equal_nan=True)
        count += int(off.any(dim=2).sum())
    return count


def run_search() -> int:
    """Scores of few kinds, rising, next to each other; k at every depth; in one go and in many."""
    count, q, g = 0, torch.zeros(1, HEADS, D), torch.ones(1, HEADS)
    q[..., 0] = 1.0
    kinds = integers(G, 20, 300)
    steps = torch.arange(300)
    near = [1 + values * 2.0**-23 for values in (kinds, steps)]
    for values in (kinds, steps, *near):
        keys = torch.zeros(300, D)
        keys[:, 0] = values
        for k, lanes in ((40, 64), (58, 0), (130, 128), (9, 32), (146, 0)):
            count += wrong([keys], [1], k, q=q, g=g, lanes=lanes)
    return count


def run_channels() -> int:
    """Keys decoded in two halves of their channels, and each form streamed past one query."""
    count, d = 0, 64
    for form in (index_plain(d, "float32"), index_fp8(d), index_fp4(d)):
        keys = exact(1, 300, d) * 7 * torch.exp2(integers(G, 4, 300, 1).float())
        keys[:, 32:] *= 4  # groups of unlike scales
        for tile, n in ((WIDE_SCORE, 2), (STREAM, 1)):
            q, g = exact(3, n, HEADS, d), exact(4, n, HEADS)
            count += wrong([keys], [n], 20, q=q, g=g, form=form, tile=tile)
    return count


def run_sequences() -> int:
    """More sequences than are looked at in one go, some idle."""
    lengths = [3 + s % 3 for s in range(132)]
    return wrong([exact(3, n, D) for n in lengths], [s % 3 // 2 for s in range(132)], 2, padding=2)


def run_rows() -> int:
    """Blocks of queries across sequences, idle sequences, padding, ratio 4."""
    keys = [exact(3, n, D) for n in (140, 3, 40, 33)]
    return wrong(keys, [18, 0, 2, 3], 3, ratio=4, padding=3)


def run_unseen() -> int:
    """The best entries of a group are those that a query does not see yet."""
    keys, q, g = torch.zeros(140, D), torch.zeros(4, HEADS, D), torch.ones(4, HEADS)
    keys[[5, 40, 70], 0], keys[139:, 0], q[..., 0] = torch.tensor([1.0, 2.0, 3.0]), 100.0, 1.0
    return wrong([keys], [4], 3, ratio=4, q=q, g=g)


def run_cuts() -> int:
    """Any number of parts, any workspace, any number of scores at once: the same rows, to the last.
    32 at once: groups of groups, groups, entries, some in several goes; 128: more groups than k."""
    keys = [exact(3, n, D) for n in (290, 140)]
    state = G.get_state()
    count = 0
    cuts = ({"splits": 3}, {"workspace": 1}, {"workspace": 4000}, {"lanes": 32}, {"lanes": 128})
    for cut in ({}, *cuts):
        G.set_state(state)
        count += wrong(keys, [3, 2], 3, **cut)
    tied = [k[integers(G, 3, len(k))] for k in keys]
    return count + sum(wrong(tied, [2, 1], 9, lanes=lanes) for lanes in (32, 64))


def unlike(mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> int:
    """Rows whose experts differ, or a weight by more than rounding (NaN equals NaN)."""
    near = torch.isclose(mine[1], theirs[1].float(), rtol=2e-6, atol=1e-12, equal_nan=True)
    return int(((mine[0] != theirs[0]) | ~near).any(dim=1).sum())


def run_route_scores() -> int:
    """Logits from -90 to 90, one for each expert: softplus keeps its digits at both ends."""
    logits = torch.cat((torch.linspace(-90, 90, 40), torch.tensor([0.0, 1e-3, -1e-3, 19.9, 20.1])))
    x, gate, bias = torch.ones(3, 1), logits[:, None], torch.zeros(45)
    ids = torch.stack([torch.randperm(45, generator=G)[:6] for _ in range(9)])
    ids[0] = torch.arange(6)  # the coldest: no weight underflows into another's digits
    tokens = integers(G, 9, 3)
    tokens[0] = 0
    with poisoned():
        chosen = moe_route(x, gate, bias, top_k=6, scale=1.5)
        hashed = moe_route_hash(x, gate, ids, tokens, scale=1.5)
    wide = (x.double(), gate.double())
    return unlike(chosen, router.moe_route(*wide, bias, top_k=6, scale=1.5)) + unlike(
        hashed, router.moe_route_hash(*wide, ids, tokens, scale=1.5)
    )


def run_route_special() -> int:
    """NaN first, then infinity; ties, zeros of both signs, a bias of -infinity; k of k experts."""
    x = torch.eye(4)
    gate = torch.zeros(12, 4)
    gate[5, 1], gate[7, 1], gate[2, 1] = torch.nan, torch.inf, torch.nan
    gate[3:9, 2] = torch.tensor([1.0, 2.0, 1.0, 2.0, 2.0, 1.0])
    bias = torch.zeros(12)
    bias[0], bias[11] = -torch.inf, -torch.inf
    root = torch.log(torch.tensor(2.0)).sqrt()
    bias[9] = torch.tensor(-(1 << 22)).int().view(torch.float32)  # NaN with a sign
    bias[4] = -root  # its sum with the score of 0 is a zero
    count = 0
    for k in (1, 3, 12):
        with poisoned():
            mine = moe_route(x, gate, bias, top_k=k, scale=2.5)
        count += unlike(mine, router.moe_route(x, gate, bias, top_k=k, scale=2.5))
    return count


def run_route_parts() -> int:
    """Every tile and share of the channels, more tokens than one block, a sliced input."""
    count = 0
    for rows, k, tile in (
        (17, 270, None), (17, 200, Tile(16, 16, 32, 3, 4, 2)), (33, 128, MANY), (65, 70, SOME),
        (130, 33, WHOLE),
    ):  # fmt: skip
        x, gate, bias = exact(3, rows, k + 5)[:, :k], exact(3, 20, k) / 16, exact(9, 20)
        tokens = integers(G, 9, rows)
        table = torch.rand(9, 20, generator=G).argsort(1)[:, :5].contiguous()
        with poisoned():
            mine = moe_route(x, gate, bias, top_k=5, scale=1.5, tile=tile)
            hashed = moe_route_hash(x, gate, table, tokens, scale=1.5, tile=tile)
        count += unlike(mine, router.moe_route(x, gate, bias, top_k=5, scale=1.5))
        count += unlike(hashed, router.moe_route_hash(x, gate, table, tokens, scale=1.5))
    return count


def differing(logits: Tensor, inputs: SampleInputs, tile: SampleTile = TILE) -> int:
    with poisoned():
        mine = sample(logits, inputs, tile=tile)
    theirs = sampler.sample(logits, inputs)
    return int(((mine.tokens != theirs.tokens) | (mine.bad != theirs.bad)).sum())


def run_sample_borders() -> int:
    """Ids that every filter just keeps or just drops, among equals: many draws of few ids."""
    rows = 12
    logits = integers(G, 3, 4, 60).float().repeat(3, 1) - 3.5
    common = {
        "temperature": torch.ones(rows), "seed": integers(G, 1 << 40, rows) - (1 << 39),
        "index": torch.arange(rows),
    }  # fmt: skip
    top_k = integers(G, 62, rows)
    top_p = torch.rand(rows, generator=G)
    top_p[:3] = torch.tensor([0.0, 1.0, 1e-9])
    min_p = torch.tensor([0.0, 0.2, 1.0]).repeat(4)
    return sum(
        differing(logits, SampleInputs(**common, **filters))
        for filters in (
            {}, {"top_k": top_k}, {"top_p": top_p}, {"min_p": min_p},
            {"top_k": top_k, "top_p": top_p, "min_p": min_p},
        )
    )  # fmt: skip


def run_sample_parts() -> int:
    """Rows longer than one program's part; the drawn id follows the running sum over all of them;
    rows that are bad, greedy or drawn side by side."""
    rows = 16
    logits = torch.randn(rows, 9000, generator=G)
    logits[1, 8999], logits[2, 4096] = torch.nan, 40.0
    logits[3] = -torch.inf
    heat, top_k, top_p = torch.ones(rows), integers(G, 1, rows), torch.ones(rows)
    heat[0], heat[2], top_k[4] = 2.0, 0.0, 5000
    top_p[:5] = torch.tensor([0.99, 1.0, 1.0, 0.5, 0.9])
    inputs = SampleInputs(
        temperature=heat,
        seed=torch.arange(rows) * 977,
        index=torch.arange(rows),
        top_k=top_k,
        top_p=top_p,
    )
    count = differing(logits, inputs) + differing(logits, SampleInputs(greedy=True))
    weight = torch.softmax(logits[:1].double() / 2, dim=-1)
    plain = SampleInputs(
        temperature=torch.full((1,), 2.0), seed=torch.tensor([5]), index=torch.tensor([9])
    )
    with poisoned():
        token = int(sample(logits[:1], plain).tokens)
    below = float(weight[0, :token].sum())
    point = float(uniform(torch.tensor([5]), torch.tensor([9])))
    return count + int(not below <= point < below + float(weight[0, token]) + 1e-12)


def run_sample_bins() -> int:
    """What bins narrow, to the last id: logits fall with the id and the drawn number is next to 1,
    so that the drawn id is the worst that is kept. Peaked, flat and tied rows of more parts than a
    block, colder ones than the last bin, top-p next to 1 and to 0."""
    vocab, tile = 1034, SampleTile(64, 4, 1024, 4)
    noise = torch.randn(vocab, generator=G)
    rows = (
        # logits, top-p, top-k, min-p
        (noise * 3, 0.95, 0, 0.0),
        (noise * 3, 0.5, 0, 0.01),
        (noise * 3, 0.999, 40, 0.0),
        (noise * 3, 1.0, 7, 0.0),
        (noise * 3, 0.0, 3, 0.0),
        (noise / 64, 0.5, 0, 0.0),
        (noise / 64, 1 - 2.0**-24, 0, 0.0),
        (noise / 64, 0.7, 1000, 0.0),
        (noise.round(), 0.9, 0, 0.0),
        (noise.round(), 1.0, 300, 0.0),
        (noise * 400, 0.9, 0, 0.0),
        (noise * 400, 1.0, 1000, 0.0),
    )
    logits, top_p, top_k, min_p = zip(*rows, strict=True)
    seeds = torch.arange(1 << 19)
    inputs = SampleInputs(
        temperature=torch.ones(len(rows)),
        seed=uniform(seeds, torch.zeros_like(seeds)).topk(len(rows)).indices,
        index=torch.zeros(len(rows), dtype=torch.int64),
        top_p=torch.tensor(top_p), top_k=torch.tensor(top_k), min_p=torch.tensor(min_p),
    )  # fmt: skip
    return differing(torch.stack(logits).sort(dim=1, descending=True).values, inputs, tile)


RUNS: dict[str, Callable[[], int]] = {
    name.removeprefix("run_").replace("_", "-"): run
    for name, run in list(globals().items())
    if name.startswith("run_")
}


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        print(json.dumps({"name": name, "wrong": RUNS[name]()}), flush=True)


if __name__ == "__main__":
    main()
