"""The step of the hyper-connections for bfloat16 streams, with its layouts written out (Gluon).

The same arithmetic as `triton.step_kernel`. What is gained by hand: every thread reads its channels
straight into the operands' places of the matrix unit (neighbouring channels: the order of a sum's
terms is free as long as both sides share it), so that nothing passes through shared memory and no
warp waits for another. A float32 weight is the sum of three bfloat16 numbers: the product has
float32's accuracy.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.jit
def _let_the_next_kernel_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _wait_for_the_kernel_before():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _stream(streams, at, live, J: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """Channels of stream J; zeros where there is no such stream. `at`: of stream 0."""
    return gl.load(streams + at + J * D, mask=live & (J < N), other=0.0)


@gluon.jit
def _weight(fn, number, d, J: gl.constexpr, N: gl.constexpr, D: gl.constexpr, NW: gl.constexpr):
    """What the site's matrix [NW, N D] has for stream J at channels d [BD, 1]: [BD, NL]."""
    at = fn + number * (N * D) + J * D + d
    return gl.load(at, mask=(number < NW) & (d < D) & (J < N), other=0.0)


@gluon.jit
def _factor(values, at, live, J: gl.constexpr, N: gl.constexpr):
    """A number of each token at `at` [M], as a column; 0 for a stream that is not there."""
    return gl.load(values + at, mask=live & (J < N), other=0.0)[:, None]


@gluon.jit
def _mixed(r0, r1, r2, r3, new, post, comb, row, live, TO: gl.constexpr, N: gl.constexpr):
    """``post_i y + sum_j C[j, i] R_j``, i = TO, of tokens `row` [M] by channels."""
    cell, live = row * (N * N) + TO, live & (TO < N)
    value = new.to(gl.float32) * _factor(post, row * N + TO, live, 0, N)
    value += r0.to(gl.float32) * _factor(comb, cell, live, 0, N)
    value += r1.to(gl.float32) * _factor(comb, cell + N, live, 1, N)
    value += r2.to(gl.float32) * _factor(comb, cell + 2 * N, live, 2, N)
    value += r3.to(gl.float32) * _factor(comb, cell + 3 * N, live, 3, N)
    return value.to(gl.bfloat16)


@gluon.jit
def _in_three(x):
    """A float32 as the exact sum of three numbers that bfloat16 holds, the largest first."""
    upper = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    rest = x - upper
    middle = (rest.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return upper.to(gl.bfloat16), middle.to(gl.bfloat16), (rest - middle).to(gl.bfloat16)


@gluon.jit
def _product(acc, values, weight):
    """acc [M, NL] plus values [M, BD] by weight [BD, NL]. The matrix unit cuts each of its sums:
    the chain of them is short, and the small parts go first."""
    upper, middle, lower = _in_three(weight)
    part = mma_v2(values, lower, gl.zeros_like(acc))
    part = mma_v2(values, middle, part)
    return acc + mma_v2(values, upper, part)


@gluon.jit
def _square(total, value):
    wide = value.to(gl.float32)
    return total + gl.sum(wide * wide, axis=1)


@gluon.jit
def _put_sums(parts, acc, square, first, rows, NW: gl.constexpr):
    """`acc` [M, NL], in column NW the sums of squares [M], as rows of tokens from `first` on."""
    total: gl.constexpr = acc.type.layout
    squares = gl.convert_layout(square, gl.SliceLayout(1, total))[:, None]
    number = gl.arange(0, acc.shape[1], gl.SliceLayout(0, total))[None, :]
    row = (first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, total)))[:, None]
    acc = gl.where(number == NW, squares, acc)
    gl.store(parts + row * acc.shape[1] + number, acc, mask=row < rows)


@gluon.jit(do_not_specialize=["rows", "splits", "steps"])
def step_kernel(
    streams, y, post, comb, mixed, fn, parts, rows, splits, steps, y_stride,
    N: gl.constexpr, D: gl.constexpr, NW: gl.constexpr, NL: gl.constexpr, M: gl.constexpr,
    BD: gl.constexpr, MIX: gl.constexpr, ACROSS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """See `triton.step_kernel`; for few tokens. ACROSS warps share the matrix's numbers: each holds
    few enough of them to have all reads under way at once. EARLY: the matrix is asked for while the
    kernel before still runs, and the kernel after starts meanwhile."""
    total: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, ACROSS], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, total, BD // 8)
    right: gl.constexpr = gl.DotOperandLayout(1, total, BD // 8)
    part = gl.program_id(1)
    first = gl.program_id(0).to(gl.int64) * M
    token = first + gl.arange(0, M, gl.SliceLayout(1, left))
    held = token < rows
    row, live = token[:, None], held[:, None]
    number = gl.arange(0, NL, gl.SliceLayout(0, right))[None, :]
    lane = gl.arange(0, BD, gl.SliceLayout(0, left))[None, :]
    column = gl.arange(0, BD, gl.SliceLayout(1, right))[:, None]
    if EARLY:
        _let_the_next_kernel_start()
    acc = gl.zeros([M, NL], gl.float32, total)
    square = gl.zeros([M], gl.float32, gl.SliceLayout(1, left))
    for step in range(steps):
        begin = (part * steps + step) * BD
        d, c = begin + lane, begin + column
        inside = live & (d < D)
        at = row * (N * D) + d
        w0 = _weight(fn, number, c, 0, N, D, NW)
        w1 = _weight(fn, number, c, 1, N, D, NW)
        w2 = _weight(fn, number, c, 2, N, D, NW)
        w3 = _weight(fn, number, c, 3, N, D, NW)
        if EARLY:
            _wait_for_the_kernel_before()
        r0 = _stream(streams, at, inside, 0, N, D)
        r1 = _stream(streams, at, inside, 1, N, D)
        r2 = _stream(streams, at, inside, 2, N, D)
        r3 = _stream(streams, at, inside, 3, N, D)
        if MIX:  # the site sees the rounded streams
            new = gl.load(y + row * y_stride + d, mask=inside, other=0.0)
            m0 = _mixed(r0, r1, r2, r3, new, post, comb, token, held, 0, N)
            m1 = _mixed(r0, r1, r2, r3, new, post, comb, token, held, 1, N)
            m2 = _mixed(r0, r1, r2, r3, new, post, comb, token, held, 2, N)
            m3 = _mixed(r0, r1, r2, r3, new, post, comb, token, held, 3, N)
            r0, r1, r2, r3 = m0, m1, m2, m3
        acc, square = _product(acc, r0, w0), _square(square, r0)
        if N > 1:
            acc, square = _product(acc, r1, w1), _square(square, r1)
        if N > 2:
            acc, square = _product(acc, r2, w2), _square(square, r2)
        if N > 3:
            acc, square = _product(acc, r3, w3), _square(square, r3)
        if MIX:  # last: no read is moved over a write
            gl.store(mixed + at, r0, mask=inside)
            gl.store(mixed + at + D, r1, mask=inside & (N > 1))
            gl.store(mixed + at + 2 * D, r2, mask=inside & (N > 2))
            gl.store(mixed + at + 3 * D, r3, mask=inside & (N > 3))
    _put_sums(parts + part.to(gl.int64) * rows * NL, acc, square, first, rows, NW)


@gluon.jit(do_not_specialize=["rows", "steps"])
def product_kernel(
    streams, fn, parts, rows, steps,
    K: gl.constexpr, NW: gl.constexpr, NL: gl.constexpr, M: gl.constexpr, BD: gl.constexpr,
    DOWN: gl.constexpr,
):  # fmt: skip
    """What `step_kernel` leaves in `parts` of streams [rows, K] as they are; for many tokens. DOWN
    warps share them. A short loop, which the caches of instructions hold, reads one step ahead."""
    total: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [DOWN, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, total, BD // 8)
    right: gl.constexpr = gl.DotOperandLayout(1, total, BD // 8)
    part = gl.program_id(1)
    first = gl.program_id(0).to(gl.int64) * M
    row = (first + gl.arange(0, M, gl.SliceLayout(1, left)))[:, None]
    number = gl.arange(0, NL, gl.SliceLayout(0, right))[None, :]
    lane = gl.arange(0, BD, gl.SliceLayout(0, left))[None, :]
    column = gl.arange(0, BD, gl.SliceLayout(1, right))[:, None]
    begin = part * steps * BD
    end = gl.minimum(begin + steps * BD, K)
    from_streams, from_fn = streams + row * K, fn + number * K
    live, wanted = row < rows, number < NW
    k, c = begin + lane, begin + column
    value = gl.load(from_streams + k, mask=live & (k < end), other=0.0)
    weight = gl.load(from_fn + c, mask=wanted & (c < end), other=0.0)
    acc = gl.zeros([M, NL], gl.float32, total)
    square = gl.zeros([M], gl.float32, gl.SliceLayout(1, left))
    for _ in range(steps):
        k, c = k + BD, c + BD
        next_value = gl.load(from_streams + k, mask=live & (k < end), other=0.0)
        next_weight = gl.load(from_fn + c, mask=wanted & (c < end), other=0.0)
        acc, square = _product(acc, value, weight), _square(square, value)
        value, weight = next_value, next_weight
    _put_sums(parts + part.to(gl.int64) * rows * NL, acc, square, first, rows, NW)
