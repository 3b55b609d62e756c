"""Hyper-connections in Triton: mix of one block, weights of the next, collapse and norm.

`step_kernel` reads every stream once: it mixes them (or takes them as they are), writes them, and
multiplies what it wrote by the site's matrix; channels are cut into parts so that the whole card
reads. Streams of half types are exact in TF32, and the float32 matrix is the sum of two numbers
that are: the product has float32's accuracy on the matrix unit. For few tokens the program that
arrives last at a token ends it; otherwise `finish_kernel` does: sums of the parts in order,
Sinkhorn in registers, collapse, norm.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _stream(streams, at, live, J: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Channels of stream J in float32; zeros where there is no such stream. `at`: of stream 0."""
    if J < N:
        found = tl.load(streams + at + J * D, mask=live, other=0.0).to(tl.float32)
    else:
        found = tl.zeros(at.shape, tl.float32)
    return found


@triton.jit
def _mixed(
    r0, r1, r2, r3, new, post, comb, row, live, TO: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """``post_i y + sum_j C[j, i] R_j``, i = TO, of tokens `row` [M, 1] by channels; `new` is y."""
    value = new * tl.load(post + row * N + TO, mask=live, other=0.0)
    cell = comb + row * N * N + TO
    value += r0 * tl.load(cell, mask=live, other=0.0)
    if N > 1:
        value += r1 * tl.load(cell + N, mask=live, other=0.0)
    if N > 2:
        value += r2 * tl.load(cell + 2 * N, mask=live, other=0.0)
    if N > 3:
        value += r3 * tl.load(cell + 3 * N, mask=live, other=0.0)
    return value


@triton.jit
def mix_kernel(
    streams, y, post, comb, mixed, y_stride,
    N: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1, 1], tl.int64)
    d = tl.program_id(1) * LANES + tl.arange(0, LANES)[None, :]
    live = d < D
    at = row * (N * D) + d
    r0 = _stream(streams, at, live, 0, N, D)
    r1 = _stream(streams, at, live, 1, N, D)
    r2 = _stream(streams, at, live, 2, N, D)
    r3 = _stream(streams, at, live, 3, N, D)
    new = tl.load(y + row * y_stride + d, mask=live, other=0.0).to(tl.float32)
    for i in tl.static_range(N):
        value = _mixed(r0, r1, r2, r3, new, post, comb, row, row >= 0, i, N)
        tl.store(mixed + at + i * D, value.to(mixed.dtype.element_ty), mask=live)


@triton.jit
def _product(acc, values, weight, EXACT: tl.constexpr):
    """acc [M, NL] plus values [M, BD] by weight [NL, BD], all float32. Values that are not EXACT
    fit TF32; the weight's upper and lower halves do."""
    if EXACT:
        acc = tl.dot(values, tl.trans(weight), acc, input_precision="ieee")
    else:
        upper = (weight.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        acc = tl.dot(values, tl.trans(upper), acc, input_precision="tf32")
        acc = tl.dot(values, tl.trans(weight - upper), acc, input_precision="tf32")
    return acc


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _finish(
    t, streams, parts, squares, base, scale, weight, x, post, comb, rows, splits, norm_eps, eps,
    iters,
    N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, DL: tl.constexpr, NL: tl.constexpr,
    SPLITS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Token t from the sums of its parts: x, and without HEAD its norm, post and comb."""
    split, k, d = tl.arange(0, SPLITS), tl.arange(0, NP), tl.arange(0, DL)
    here = split < splits
    place = split.to(tl.int64) * rows + t
    square = tl.load(squares + place, mask=here, other=0.0, cache_modifier=".cg")
    rstd = tl.rsqrt(tl.sum(square, axis=0) / (N * D) + norm_eps)
    row = parts + place * NL
    some = k < N
    both = here[:, None] & some[None, :]
    m = tl.sum(
        tl.load(row[:, None] + k[None, :], mask=both, other=0.0, cache_modifier=".cg"), axis=0
    )
    pre = _sigmoid(m * rstd * tl.load(scale) + tl.load(base + k, mask=some, other=0.0))  # [NP]
    pre += eps
    if not HEAD:
        m = tl.sum(
            tl.load(row[:, None] + (N + k)[None, :], mask=both, other=0.0, cache_modifier=".cg"),
            axis=0,
        )
        value = m * rstd * tl.load(scale + 1) + tl.load(base + N + k, mask=some, other=0.0)
        tl.store(post + t * N + k, 2.0 * _sigmoid(value), mask=some)
        cell = k[:, None] * N + k[None, :]  # [NP (j), NP (k)]
        inner = some[:, None] & some[None, :]
        m = tl.sum(
            tl.load(
                row[:, None, None] + 2 * N + cell[None, :, :],
                mask=here[:, None, None] & inner[None, :, :], other=0.0, cache_modifier=".cg",
            ),
            axis=0,
        )  # fmt: skip
        bias = tl.load(base + 2 * N + cell, mask=inner, other=0.0)
        logits = tl.where(inner, m * rstd * tl.load(scale + 2) + bias, -1e30)
        c = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
        c = tl.where(inner, c / tl.sum(c, axis=1, keep_dims=True) + eps, 0.0)
        c = c / (tl.sum(c, axis=0, keep_dims=True) + eps)
        for _ in range(iters - 1):
            c = c / (tl.sum(c, axis=1, keep_dims=True) + eps)
            c = c / (tl.sum(c, axis=0, keep_dims=True) + eps)
        tl.store(comb + t * (N * N) + cell, c, mask=inner)
    inside = d < D
    total = tl.zeros([DL], tl.float32)
    for j in tl.static_range(N):
        share = tl.sum(tl.where(k == j, pre, 0.0), axis=0)
        at = streams + (t * N + j) * D + d
        values = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        total += share * values.to(tl.float32)
    if not HEAD:
        norm = tl.rsqrt(tl.sum(total * total, axis=0) / D + norm_eps)
        total = total * norm * tl.load(weight + d, mask=inside, other=0.0)
    tl.store(x + t * D + d, total.to(x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "splits", "steps", "iters"])
def step_kernel(
    streams, y, post, comb, mixed, fn, parts, squares, counters, base, scale, weight, x, post_out,
    comb_out, rows, splits, steps, y_stride, norm_eps, eps, iters,
    N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, DL: tl.constexpr, NW: tl.constexpr,
    NL: tl.constexpr, M: tl.constexpr, PER: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr,
    MIX: tl.constexpr, EXACT: tl.constexpr, LAST: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """PER tokens, one part of their channels; `fn` [NW, N D]. MIX: streams are mixed first."""
    block, part = tl.program_id(0), tl.program_id(1)
    lane, number = tl.arange(0, M), tl.arange(0, NL)
    row = (block * PER + lane).to(tl.int64)
    held = (lane < PER) & (row < rows)
    row, live = row[:, None], held[:, None]
    acc = tl.zeros([M, NL], tl.float32)
    square = tl.zeros([M], tl.float32)
    for step in range(steps):
        d = (part * steps + step) * BD + tl.arange(0, BD)[None, :]
        inside = live & (d < D)
        at = row * (N * D) + d
        r0 = _stream(streams, at, inside, 0, N, D)
        r1 = _stream(streams, at, inside, 1, N, D)
        r2 = _stream(streams, at, inside, 2, N, D)
        r3 = _stream(streams, at, inside, 3, N, D)
        new = r0
        if MIX:
            new = tl.load(y + row * y_stride + d, mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(N):
            if MIX:
                value = _mixed(r0, r1, r2, r3, new, post, comb, row, live, i, N)
                value = value.to(mixed.dtype.element_ty)
                tl.store(mixed + at + i * D, value, mask=inside)
                value = value.to(tl.float32)  # the site sees the rounded streams
            elif i == 0:
                value = r0
            elif i == 1:
                value = r1
            elif i == 2:
                value = r2
            else:
                value = r3
            square += tl.sum(value * value, axis=1)
            column = fn + number.to(tl.int64)[:, None] * (N * D) + i * D + d
            found = tl.load(column, mask=(number < NW)[:, None] & (d < D), other=0.0)  # [NL, BD]
            acc = _product(acc, value, found, EXACT)
    place = part.to(tl.int64) * rows + row
    tl.store(parts + place * NL + number[None, :], acc, mask=live)
    tl.store(squares + place, square[:, None], mask=live)
    if LAST:
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + block, 1, sem="acq_rel")
        if arrived == splits - 1:
            tl.store(counters + block, 0)
            _finish(
                block.to(tl.int64), mixed, parts, squares, base, scale, weight, x, post_out,
                comb_out, rows, splits, norm_eps, eps, iters, N, NP, D, DL, NL, SPLITS, HEAD,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "splits", "iters"])
def finish_kernel(
    streams, parts, squares, base, scale, weight, x, post, comb, rows, splits, norm_eps, eps,
    iters,
    N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, DL: tl.constexpr, NL: tl.constexpr,
    SPLITS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    _finish(
        tl.program_id(0).to(tl.int64), streams, parts, squares, base, scale, weight, x, post, comb,
        rows, splits, norm_eps, eps, iters, N, NP, D, DL, NL, SPLITS, HEAD,
    )  # fmt: skip
