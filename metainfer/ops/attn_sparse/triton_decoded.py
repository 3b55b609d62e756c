"""Scaled latents decoded once for a chunk, instead of once per query that reads them.

Neighbouring queries of a chunk read nearly the same window and often the same entries: 8,192
queries of 640 keys decode 5.2 million latents where a context of 8,192 tokens holds 10,000. A
program decodes one page into plain bfloat16 pages and says in a second table where it went; the
kernel for plain latents does the rest. Decoding is exact (e4m3 times a power of two fits bfloat16).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.attn_sparse.triton import _keys


@triton.jit(do_not_specialize=["width", "stride", "window", "ratio", "spare"])
def pages_kernel(
    data, table, positions, query_start, context_lens, held, held_table,
    width, stride, window, ratio, spare,
    PAGE: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr, ROW: tl.constexpr,
    BYTES: tl.constexpr, SCALES: tl.constexpr, STEP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Page p of sequence s, where this call can read it, into `held`; else -1 in `held_table`.

    `window` > 0: the page holds tokens, of which those that a window reaches count; `spare` pages
    lie between the sequences' parts. 0: it holds entries of `ratio` tokens, all visible ones count.
    """
    s, p = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(query_start + s), tl.load(query_start + s + 1)
    context = tl.load(context_lens + s)
    low, high = 0, -1
    target = s * width + p
    if begin < end:
        if window > 0:
            first = tl.load(positions + begin).to(tl.int32)
            low = tl.maximum(first - window + 1, 0) // PAGE
            high = (context - 1) // PAGE
            target = begin // PAGE + s * spare + p - low
        else:
            # Rounded up: with none visible the page is skipped.
            high = (context // ratio + PAGE - 1) // PAGE - 1
    wanted = (p >= low) & (p <= high)
    tl.store(held_table + s * width + p, tl.where(wanted, target, -1))
    if wanted:
        page = tl.load(table + s.to(tl.int64) * stride + p).to(tl.int64)
        lane = tl.arange(0, D)
        for step in range(0, PAGE, STEP):
            row = step + tl.arange(0, STEP)
            at = page * BYTES + row * ROW
            scale_at = page * BYTES + PAGE * ROW + row * SCALES
            keys = _keys(data, tl.multiple_of(at, 8), scale_at, row < PAGE, D, SCALED, TAIL)
            where = (target.to(tl.int64) * PAGE + row)[:, None] * D + lane[None, :]
            tl.store(held + where, keys, mask=(row < PAGE)[:, None])
