"""What each rank's part of attention weighs, in Triton: one program for a query and a head.

It reads the logarithms of all parts for its head, scales its row of the mix, adds what stands
beside the parts where the head is this rank's, turns the tail back and writes to the block of the
head's own rank. All in float32, rounded once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metainfer.core.errors import InternalError


@triton.jit
def _scaled(
    mixed, near, row, lane, inside, share, weight, BESIDE: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Channels `lane` of this head's output. `near` points at its row of what stands beside."""
    found = tl.load(mixed + row * D + lane, mask=inside, other=0.0) * share
    if BESIDE:
        found += tl.load(near + lane, mask=inside, other=0.0) * weight
    return found


@triton.jit(do_not_specialize=["tokens", "rank"])
def weigh_kernel(
    mixed, logs, near, cos_sin, positions, out, tokens, rank,
    RANKS: tl.constexpr, LANES_R: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    LANES: tl.constexpr, TURNED: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ALL: tl.constexpr = RANKS * HEADS
    WIDE: tl.constexpr = ALL + HEADS * BESIDE
    owner, own = head // HEADS, head % HEADS
    r = tl.arange(0, LANES_R)
    each = tl.load(logs + (r * tokens + token) * WIDE + head, mask=r < RANKS, other=float("-inf"))
    mine = tl.load(logs + (rank * tokens + token) * WIDE + head)
    top = tl.max(each, axis=0)
    beside = top
    if BESIDE:
        beside = tl.load(logs + (owner * tokens + token) * WIDE + ALL + own)
        top = tl.maximum(top, beside)
    total = tl.sum(tl.exp(each - top), axis=0)
    if BESIDE:
        total += tl.exp(beside - top)
    share = tl.exp(mine - top) / total
    weight = 0.0
    if BESIDE:
        weight = tl.where(owner == rank, tl.exp(beside - top) / total, 0.0)
    lane = tl.arange(0, LANES)
    inside = lane < D
    row, side = token * ALL + head, near + (token * HEADS + own) * D
    result = _scaled(mixed, side, row, lane, inside, share, weight, BESIDE, D)
    if TURNED:
        turns = inside & (lane >= D - TURNED)
        other = _scaled(mixed, side, row, lane ^ 1, turns, share, weight, BESIDE, D)
        at = cos_sin + tl.load(positions + token) * TURNED + (lane - (D - TURNED)) // 2
        cos = tl.load(at, mask=turns, other=1.0)
        sin = tl.load(at + TURNED // 2, mask=turns, other=0.0)
        result = result * cos + tl.where(lane % 2 == 0, other, -other) * sin
    where = ((owner * tokens + token) * HEADS + own) * D + lane
    tl.store(out + where, result.to(out.dtype.element_ty), mask=inside)


def attn_weigh(
    q: Tensor,
    mixed: Tensor,
    logs: Tensor,
    near: Tensor | None,
    cos_sin: Tensor | None,
    positions: Tensor,
    *,
    rank: int,
) -> Tensor:
    """See `ref.attn_weigh`."""
    given = (mixed, logs, near, cos_sin)
    if not all(each is None or each.is_contiguous() for each in given):
        raise InternalError("attn_weigh wants contiguous mixes, logarithms and tables")
    ranks, (tokens, heads, d) = logs.shape[0], q.shape
    out = torch.empty((ranks, tokens, heads, d), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    weigh_kernel[(tokens, ranks * heads)](
        mixed, logs, logs if near is None else near, logs if cos_sin is None else cos_sin,
        positions, out, tokens, rank, ranks, triton.next_power_of_2(ranks), heads, d,
        triton.next_power_of_2(d), 0 if cos_sin is None else cos_sin.shape[1], near is not None,
        num_warps=4 if d > 256 else 1,
    )  # fmt: skip
    return out
