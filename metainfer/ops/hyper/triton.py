"""Hyper-connections in Triton: mix of one block, weights of the next, collapse and norm.

`step_kernel` reads every stream once: it mixes them (or takes them as they are), writes them, and
multiplies what it wrote by the site's matrix; channels are cut into parts so that the whole card
reads. That of bfloat16 streams is in `triton_direct.py`. `finish_kernel` sums the parts in order:
programs of one kind collapse and norm a token each, programs of the other kind make the weights of
the block's end (Sinkhorn in registers) meanwhile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _stream(streams, at, live, J: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Channels of stream J as stored; zeros where there is no such stream. `at`: of stream 0."""
    if J < N:
        found = tl.load(streams + at + J * D, mask=live, other=0.0)
    else:
        found = tl.zeros(at.shape, streams.dtype.element_ty)
    return found


@triton.jit
def _mixed(
    r0, r1, r2, r3, new, post, comb, row, live, TO: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """``post_i y + sum_j C[j, i] R_j``, i = TO, of tokens `row` [M, 1] by channels, in the streams'
    type; `new` is y."""
    value = new.to(tl.float32) * tl.load(post + row * N + TO, mask=live, other=0.0)
    cell = comb + row * N * N + TO
    value += r0.to(tl.float32) * tl.load(cell, mask=live, other=0.0)
    if N > 1:
        value += r1.to(tl.float32) * tl.load(cell + N, mask=live, other=0.0)
    if N > 2:
        value += r2.to(tl.float32) * tl.load(cell + 2 * N, mask=live, other=0.0)
    if N > 3:
        value += r3.to(tl.float32) * tl.load(cell + 3 * N, mask=live, other=0.0)
    return value.to(r0.dtype)


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
    new = tl.load(y + row * y_stride + d, mask=live, other=0.0)
    for i in tl.static_range(N):
        value = _mixed(r0, r1, r2, r3, new, post, comb, row, row >= 0, i, N)
        tl.store(mixed + at + i * D, value, mask=live)


@triton.jit(do_not_specialize=["rows", "splits", "steps"])
def step_kernel(
    streams, y, post, comb, mixed, fn, parts, rows, splits, steps, y_stride,
    N: tl.constexpr, D: tl.constexpr, NW: tl.constexpr, NL: tl.constexpr, M: tl.constexpr,
    BD: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """M tokens, one part of their channels; `fn` [NW, N D]. MIX: streams are mixed first. Into
    `parts` [splits, rows, NL]: NW products, then the sum of squares."""
    part = tl.program_id(1)
    number = tl.arange(0, NL)[:, None]
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)[:, None]
    live = row < rows
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
            new = tl.load(y + row * y_stride + d, mask=inside, other=0.0)
        for i in tl.static_range(N):
            if MIX:  # the site sees the rounded streams
                value = _mixed(r0, r1, r2, r3, new, post, comb, row, live, i, N)
                tl.store(mixed + at + i * D, value, mask=inside)
            elif i == 0:
                value = r0
            elif i == 1:
                value = r1
            elif i == 2:
                value = r2
            else:
                value = r3
            wide = value.to(tl.float32)
            square += tl.sum(wide * wide, axis=1)
            column = fn + number * (N * D) + i * D + d
            weight = tl.load(column, mask=(number < NW) & (d < D), other=0.0)  # [NL, BD]
            acc = tl.dot(wide, tl.trans(weight), acc, input_precision="ieee")
    number = tl.arange(0, NL)[None, :]
    acc = tl.where(number == NW, square[:, None], acc)
    place = part.to(tl.int64) * rows + row
    tl.store(parts + place * NL + number, acc, mask=live)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _row(comb, at, live, eps, J: tl.constexpr, N: tl.constexpr):
    """Softmax of row J of the N by N logits of each token, plus eps; zeros where there is none."""
    none = tl.zeros(at.shape, tl.float32)
    a, b, c, d = none, none, none, none
    if J < N:
        cell = comb + at + J * N
        a = tl.load(cell, mask=live, other=0.0)
        top = a
        if N > 1:
            b = tl.load(cell + 1, mask=live, other=0.0)
            top = tl.maximum(top, b)
        if N > 2:
            c = tl.load(cell + 2, mask=live, other=0.0)
            top = tl.maximum(top, c)
        if N > 3:
            d = tl.load(cell + 3, mask=live, other=0.0)
            top = tl.maximum(top, d)
        a = tl.exp(a - top)
        total = a
        if N > 1:
            b = tl.exp(b - top)
            total += b
        if N > 2:
            c = tl.exp(c - top)
            total += c
        if N > 3:
            d = tl.exp(d - top)
            total += d
        share = 1.0 / total
        a = a * share + eps
        if N > 1:
            b = b * share + eps
        if N > 2:
            c = c * share + eps
        if N > 3:
            d = d * share + eps
    return a, b, c, d


@triton.jit
def _inverse(x):
    """1 / x of x > 0 within three units in the last place: two instructions, no case apart."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _divisor(before, k0, k1, k2, k3, s0, s1, s2, s3, eps, J: tl.constexpr, N: tl.constexpr):
    """``sum_i k_i s_i + eps before``: what row or column J is divided by once its sums are 1."""
    found = before
    if J < N:
        found = (k0 * s0 + k1 * s1) + (k2 * s2 + (k3 * s3 + eps * before))
    return found


@triton.jit
def _put_row(comb, at, live, k0, k1, k2, k3, s0, s1, s2, s3, a, J: tl.constexpr, N: tl.constexpr):
    if J < N:
        cell = comb + at + J * N
        u = _inverse(a)
        tl.store(cell, k0 * u * s0, mask=live)
        if N > 1:
            tl.store(cell + 1, k1 * u * s1, mask=live)
        if N > 2:
            tl.store(cell + 2, k2 * u * s2, mask=live)
        if N > 3:
            tl.store(cell + 3, k3 * u * s3, mask=live)


@triton.jit
def _sinkhorn(comb, at, live, eps, iters, N: tl.constexpr):
    """The logits of tokens at `at` [B] in `comb` become their weights, in place.

    After every step C[j, k] is K[j, k] / (a_j b_k), K the softmax: a row step replaces a_j by
    ``sum_k K[j, k] / b_k + eps a_j`` and leaves b, a column step likewise. Eight numbers a token
    change, not sixteen, and errors of rounding do not add up over the steps.
    """
    k00, k01, k02, k03 = _row(comb, at, live, eps, 0, N)
    k10, k11, k12, k13 = _row(comb, at, live, eps, 1, N)
    k20, k21, k22, k23 = _row(comb, at, live, eps, 2, N)
    k30, k31, k32, k33 = _row(comb, at, live, eps, 3, N)
    a0 = tl.full(at.shape, 1.0, tl.float32)
    a1, a2, a3 = a0, a0, a0
    b0 = _divisor(a0, k00, k10, k20, k30, a0, a1, a2, a3, eps, 0, N)
    b1 = _divisor(a0, k01, k11, k21, k31, a0, a1, a2, a3, eps, 1, N)
    b2 = _divisor(a0, k02, k12, k22, k32, a0, a1, a2, a3, eps, 2, N)
    b3 = _divisor(a0, k03, k13, k23, k33, a0, a1, a2, a3, eps, 3, N)
    for _ in range(iters - 1):
        s0, s1, s2, s3 = _inverse(b0), _inverse(b1), _inverse(b2), _inverse(b3)
        a0 = _divisor(a0, k00, k01, k02, k03, s0, s1, s2, s3, eps, 0, N)
        a1 = _divisor(a1, k10, k11, k12, k13, s0, s1, s2, s3, eps, 1, N)
        a2 = _divisor(a2, k20, k21, k22, k23, s0, s1, s2, s3, eps, 2, N)
        a3 = _divisor(a3, k30, k31, k32, k33, s0, s1, s2, s3, eps, 3, N)
        s0, s1, s2, s3 = _inverse(a0), _inverse(a1), _inverse(a2), _inverse(a3)
        b0 = _divisor(b0, k00, k10, k20, k30, s0, s1, s2, s3, eps, 0, N)
        b1 = _divisor(b1, k01, k11, k21, k31, s0, s1, s2, s3, eps, 1, N)
        b2 = _divisor(b2, k02, k12, k22, k32, s0, s1, s2, s3, eps, 2, N)
        b3 = _divisor(b3, k03, k13, k23, k33, s0, s1, s2, s3, eps, 3, N)
    s0, s1, s2, s3 = _inverse(b0), _inverse(b1), _inverse(b2), _inverse(b3)
    tl.debug_barrier()  # all threads have read the logits before one writes
    _put_row(comb, at, live, k00, k01, k02, k03, s0, s1, s2, s3, a0, 0, N)
    _put_row(comb, at, live, k10, k11, k12, k13, s0, s1, s2, s3, a1, 1, N)
    _put_row(comb, at, live, k20, k21, k22, k23, s0, s1, s2, s3, a2, 2, N)
    _put_row(comb, at, live, k30, k31, k32, k33, s0, s1, s2, s3, a3, 3, N)


@triton.jit
def _ends(
    first, parts, base, scale, post, comb, rows, splits, norm_eps, eps, iters,
    N: tl.constexpr, D: tl.constexpr, NL: tl.constexpr, SPLITS: tl.constexpr, B: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`post` and `comb` of the B tokens from `first` on."""
    number, split = tl.arange(0, NL), tl.arange(0, SPLITS)
    row = first + tl.arange(0, B)
    live = row < rows
    wide: tl.constexpr = (N + 2) * N
    # The site's own numbers come from far: they are asked for before the parts.
    factor = tl.load(scale + tl.where(number < 2 * N, 1, 2))
    bias = tl.load(base + number, mask=number < wide, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    kept = (live[:, None] & (split < splits)[None, :])[:, :, None]
    place = split.to(tl.int64)[None, :] * rows + row[:, None]
    found = tl.load(parts + place[:, :, None] * NL + number[None, None, :], mask=kept, other=0.0)
    m = tl.sum(found, axis=1)  # [B, NL]
    square = tl.sum(tl.where(number[None, :] == wide, m, 0.0), axis=1)
    rstd = tl.rsqrt(square / (N * D) + norm_eps)
    value = m * rstd[:, None] * factor[None, :] + bias[None, :]
    lane, row = number[None, :], row[:, None]
    is_post = (lane >= N) & (lane < 2 * N) & live[:, None]
    tl.store(post + row * N + lane - N, 2.0 * _sigmoid(value), mask=is_post)
    is_comb = (lane >= 2 * N) & (lane < wide) & live[:, None]
    tl.store(comb + row * N * N + lane - 2 * N, value, mask=is_comb)
    tl.debug_barrier()
    row = first + tl.arange(0, B)
    _sinkhorn(comb, row * N * N, row < rows, eps, iters, N)


@triton.jit
def _share(m, number, K: tl.constexpr, N: tl.constexpr):
    """pre of stream K out of a token's [NL]."""
    found = 0.0
    if K < N:
        found = tl.sum(tl.where(number == K, m, 0.0), axis=0)
    return found


@triton.jit
def _collapse(
    t, streams, parts, base, scale, weight, x, rows, splits, norm_eps, eps,
    N: tl.constexpr, D: tl.constexpr, DL: tl.constexpr, NW: tl.constexpr, NL: tl.constexpr,
    SPLITS: tl.constexpr, HEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x of token t: without HEAD its norm too."""
    number, split, d = tl.arange(0, NL), tl.arange(0, SPLITS), tl.arange(0, DL)
    inside = d < D
    # All that comes from far is under way while the parts are summed.
    factor = tl.load(scale)
    bias = tl.load(base + number, mask=number < N, other=0.0)
    if not HEAD:
        gain = tl.load(weight + d, mask=inside, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    at = t * (N * D) + d
    r0 = _stream(streams, at, inside, 0, N, D)
    r1 = _stream(streams, at, inside, 1, N, D)
    r2 = _stream(streams, at, inside, 2, N, D)
    r3 = _stream(streams, at, inside, 3, N, D)
    place = (split.to(tl.int64) * rows + t)[:, None] * NL + number[None, :]
    m = tl.sum(tl.load(parts + place, mask=(split < splits)[:, None], other=0.0), axis=0)
    square = tl.sum(tl.where(number == NW, m, 0.0), axis=0)
    rstd = tl.rsqrt(square / (N * D) + norm_eps)
    pre = _sigmoid(m * rstd * factor + bias) + eps
    total = _share(pre, number, 0, N) * r0.to(tl.float32)
    total += _share(pre, number, 1, N) * r1.to(tl.float32)
    total += _share(pre, number, 2, N) * r2.to(tl.float32)
    total += _share(pre, number, 3, N) * r3.to(tl.float32)
    if not HEAD:
        norm = tl.rsqrt(tl.sum(total * total, axis=0) / D + norm_eps)
        total = total * norm * gain
    tl.store(x + t * D + d, total.to(x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "splits", "iters"])
def finish_kernel(
    streams, parts, base, scale, weight, x, post, comb, rows, splits, norm_eps, eps, iters,
    N: tl.constexpr, D: tl.constexpr, DL: tl.constexpr, NW: tl.constexpr, NL: tl.constexpr,
    SPLITS: tl.constexpr, B: tl.constexpr, HEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x of a token, or post and comb of B tokens: those take longest and start first. HEAD: x
    alone. EARLY: started while the first kernel runs."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    ends = 0
    if not HEAD:
        ends = tl.cdiv(rows, B)
    if program < ends:
        if not HEAD:
            _ends(
                program.to(tl.int64) * B, parts, base, scale, post, comb, rows, splits, norm_eps,
                eps, iters, N, D, NL, SPLITS, B, EARLY,
            )  # fmt: skip
    else:
        # Backwards: what was written last is still in the cache.
        t = (rows - 1 - (program - ends)).to(tl.int64)
        _collapse(
            t, streams, parts, base, scale, weight, x, rows, splits, norm_eps, eps,
            N, D, DL, NW, NL, SPLITS, HEAD, EARLY,
        )  # fmt: skip
