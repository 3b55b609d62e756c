"""Times the CPU kernels at the shapes of SmolLM2-135M, after checking them against float64.

    python benchmarks/cpu_ops.py [--seconds S] [--threads N] [--only linear|attention|small]

Prediction, written before the first run (2 cores, about 20 GB/s from memory, 2 x 32 flop/cycle
at 3.5 GHz = 220 GFLOP/s): one row is bound by bytes, so `c` costs bytes / 20 GB/s (Q4_1: 0.625 B
per weight, Q8_0: 1.06) where the float32 paths cost 4 B per weight, 6.4 times as much; from about
8 rows on all are bound by arithmetic, `c` at 150 GFLOP/s streaming and 190 in panels.
Attention: one query reads 3 x 64 x 8 B per position, 20 GB/s; a prompt runs at 100 GFLOP/s.

Each weight is multiplied out of a set larger than the last-level cache, as a model's layers are.
Candidates take turns within one loop; the table gives median and median absolute deviation.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from metainfer.formats.quant import RawTensor, dequantise, quantise
from metainfer.kernels import native
from metainfer.ops.activation.cpu_c import swiglu
from metainfer.ops.attn_paged.cpu_c import attn_paged
from metainfer.ops.kv_write.cpu_c import kv_write
from metainfer.ops.linear import cpu_c, cpu_onednn
from metainfer.ops.norm.cpu_c import add_rmsnorm, rmsnorm
from metainfer.ops.rope.cpu_c import rope

SHAPES = (  # name, scheme, N, K, copies of it held
    ("qkv", "Q4_1", 960, 576, 30),
    ("o", "Q4_1", 576, 576, 30),
    ("gate_up", "Q4_1", 3072, 576, 30),
    ("down", "Q4_1", 576, 1536, 30),
    ("head", "Q8_0", 49152, 576, 1),
)
ROWS = (1, 8, 128, 1000)
HEADS, KV_HEADS, WIDTH, PAGE = 9, 3, 64, 16

Call = Callable[[], object]


def take_turns(calls: Sequence[Call], seconds: float) -> list[tuple[float, float, int]]:
    """(median, MAD, n) in seconds of each call; the calls alternate."""
    samples: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[0]) < 5:
        for call, row in zip(calls, samples, strict=True):
            start = time.perf_counter()
            call()
            row.append(time.perf_counter() - start)
    result = []
    for row in samples:
        middle = statistics.median(row)
        result.append((middle, statistics.median(abs(s - middle) for s in row), len(row)))
    return result


def show(name: str, unit: float, work: str, median: float, mad: float, n: int) -> None:
    rate = unit / median / 1e9
    print(
        f"{name:<28}{median * 1e6:>11.1f} us  mad {mad * 1e6:>8.1f}  n {n:>4}  {rate:7.1f} {work}"
    )


def over(calls: Sequence[Callable[[], torch.Tensor]]) -> Call:
    """One call that goes through all of them."""

    def run() -> None:
        for call in calls:
            call()

    return run


def bench_linear(seconds: float) -> None:
    for name, scheme, n, k, copies in SHAPES:
        raws = [quantise(torch.randn(n, k) * 0.05, scheme) for _ in range(min(copies, 8))]
        raws = [RawTensor(r.scheme, r.shape, r.data.clone()) for r in (raws * copies)[:copies]]
        for rows in ROWS:
            if n < 10_000 or rows <= 8:  # only rows that are sampled reach the head
                linear_rows(f"{name} T={rows}", raws, torch.randn(rows, k), seconds)


def linear_rows(name: str, raws: list[RawTensor], x: torch.Tensor, seconds: float) -> None:
    copies = len(raws)
    dense = [dequantise(raw) for raw in raws]
    packed = [cpu_c.pack([raw]) for raw in raws]
    blocked = [cpu_onednn.pack([raw]) for raw in raws]
    exact = x.double() @ dense[0].double().T
    for found in (cpu_c.linear(x, packed[0]), cpu_onednn.linear(x, blocked[0])):
        assert float((found - exact).abs().max() / exact.abs().max()) < 1e-5
    calls = [
        over([lambda p=p: cpu_c.linear(x, p) for p in packed]),
        over([lambda p=p: cpu_onednn.linear(x, p) for p in blocked]),
        over([lambda w=w: F.linear(x, w) for w in dense]),
    ]
    flop = 2.0 * x.numel() * dense[0].shape[0]
    labels = ("c", "onednn", "F.linear")
    for label, row in zip(labels, take_turns(calls, seconds), strict=True):
        show(f"{name} {label}", flop, "GFLOP/s", row[0] / copies, row[1] / copies, row[2])


def cache_of(sequences: int, context: int) -> tuple[torch.Tensor, ...]:
    pages = -(-context // PAGE)
    shape = (sequences * pages, PAGE, KV_HEADS, WIDTH)
    table = torch.randperm(sequences * pages).int().view(sequences, pages)
    return torch.randn(shape), torch.randn(shape), table


def bench_attention(seconds: float) -> None:
    for sequences in (1, 8):
        for context in (64, 512, 2000):
            decode_row(sequences, context, seconds)
    for context in (128, 1000, 2000):
        prompt_row(context, seconds)


def decode_row(sequences: int, context: int, seconds: float) -> None:
    layers = [cache_of(sequences, context) for _ in range(30)]
    scale = WIDTH**-0.5
    q = torch.randn(sequences, HEADS, WIDTH)
    start = torch.arange(sequences + 1).int()
    lens = torch.full((sequences,), context).int()
    k, v, table = layers[0]
    exact = torch.stack([gathered(q[s], k, v, table[s], context) for s in range(sequences)])
    found = attn_paged(q, k, v, table, start, lens, scale=scale)
    assert float((found - exact).abs().max()) < 1e-5
    call = over([lambda c=c: attn_paged(q, *c, start, lens, scale=scale) for c in layers])
    median, mad, n = take_turns([call], seconds)[0]
    size = 8.0 * sequences * context * KV_HEADS * WIDTH
    show(f"decode B={sequences} ctx={context}", size, "GB/s", median / 30, mad / 30, n)


def prompt_row(context: int, seconds: float) -> None:
    k, v, table = cache_of(1, context)
    q = torch.randn(context, HEADS, WIDTH)
    start, lens = torch.tensor([0, context]).int(), torch.tensor([context]).int()
    heads = [
        cache[table[0].long()].flatten(0, 1)[:context].transpose(0, 1)[None].contiguous()
        for cache in (k, v)
    ]

    def ours() -> torch.Tensor:
        return attn_paged(q, k, v, table, start, lens, scale=WIDTH**-0.5)

    def library() -> torch.Tensor:
        turned = q.transpose(0, 1)[None]
        return F.scaled_dot_product_attention(turned, *heads, is_causal=True, enable_gqa=True)

    assert float((ours() - library()[0].transpose(0, 1)).abs().max()) < 1e-4
    flop = 4.0 * HEADS * WIDTH * context * (context + 1) / 2
    for label, row in zip(("c", "sdpa"), take_turns([ours, library], seconds), strict=True):
        show(f"prefill {context} {label}", flop, "GFLOP/s", *row)


def gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, context: int
) -> torch.Tensor:
    """Attention of one query [Hq, D] in float64."""
    keys, values = (
        c[pages.long()].flatten(0, 1)[:context].double().repeat_interleave(HEADS // KV_HEADS, 1)
        for c in (k, v)
    )
    weights = torch.softmax(torch.einsum("hd,khd->hk", q.double(), keys) * WIDTH**-0.5, -1)
    return torch.einsum("hk,khd->hd", weights, values)


def bench_small(seconds: float) -> None:
    for rows in (1, 8, 1000):
        small_rows(rows, seconds)


def small_rows(rows: int, seconds: float) -> None:
    x, weight = torch.randn(rows, 576), torch.randn(576)
    qkv, table = torch.randn(rows, 960), torch.randn(2048, 64)
    q, k = qkv[:, :576].view(rows, 9, 64), qkv[:, 576:768].view(rows, 3, 64)
    gate_up, positions = torch.randn(rows, 3072), torch.arange(rows)
    cache = torch.zeros(2, 64, PAGE, KV_HEADS, WIDTH)
    calls: dict[str, tuple[Call, float]] = {
        "rmsnorm": (lambda: rmsnorm(x, weight, 1e-5), 8.0 * x.numel()),
        "add_rmsnorm": (lambda: add_rmsnorm(x, x, weight, 1e-5), 16.0 * x.numel()),
        "rope": (lambda: rope(q, k, positions, table), 8.0 * (q.numel() + k.numel())),
        "swiglu": (lambda: swiglu(gate_up), 6.0 * gate_up.numel()),
        "kv_write": (lambda: kv_write(k, k, cache[0], cache[1], positions), 16.0 * k.numel()),
    }
    times = take_turns([call for call, _ in calls.values()], seconds)
    for (name, (_, size)), row in zip(calls.items(), times, strict=True):
        show(f"{name} T={rows}", size, "GB/s", *row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="per row of the table")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=("linear", "attention", "small"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    compiler = native.find_compiler()
    print(
        f"commit {commit}, torch {torch.__version__}, {options.threads} threads, "
        f"{native.simd_level()}, {platform.machine()}, {compiler.version if compiler else 'no C'}"
    )
    benches = {"linear": bench_linear, "attention": bench_attention, "small": bench_small}
    for name, bench in benches.items():
        if options.only in (None, name):
            bench(options.seconds)


if __name__ == "__main__":
    main()
