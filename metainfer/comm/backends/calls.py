"""From a plan to filled calls: what every transport on slabs has in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metainfer.comm.layout import Call
from metainfer.comm.pieces import Piece, Slots, cut, element_type, fits
from metainfer.comm.plan import CommPlan
from metainfer.comm.request import ELEMENT_BYTES, Op, Request, shard
from metainfer.core.errors import InternalError

DTYPES = {name: getattr(torch, name) for name in ELEMENT_BYTES}


@dataclass(frozen=True, slots=True)
class Side:
    """Counts that ride along: int32 tensors of equal length, summed over the ranks."""

    given: Tensor
    summed: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Operands of an epilogue: `residual` [rows, hidden] is updated, `weight` [hidden], and
    `normed` [rows, hidden] is written."""

    residual: Tensor
    weight: Tensor
    normed: Tensor


def stripe(piece: Piece, blocks: int) -> int:
    """Elements of one block: whole units. The same on all ranks, for flags are per block."""
    units = -(-max((*piece.in_len, *piece.out_len), default=0) // piece.unit)
    return -(-units // blocks) * piece.unit


class Caller:
    """Makes the calls of one rank. `slabs`, `error`, `state`: addresses as the code that runs a
    call sees them."""

    device = "cpu"

    def __init__(
        self,
        rank: int,
        slabs: Sequence[int],
        slots: Slots,
        *,
        error: int,
        state: int,
        budget_s: float,
    ) -> None:
        self.rank, self.world = rank, len(slabs)
        self.slots = slots
        self.budget_s = budget_s
        self._slabs = tuple(slabs)
        self._error, self._state = error, state
        self._built: dict[tuple[Request, str], list[tuple[Call, Piece]]] = {}
        self._names: dict[int, str] = {}

    def calls_of(self, plan: CommPlan) -> list[tuple[Call, Piece]]:
        """The calls of a plan, made once; `fill` completes one.

        Raises:
            InternalError: the plan is for another number of ranks, or larger slots.
        """
        key = (plan.request, plan.algorithm)  # a digest would cost more than a small call
        found = self._built.get(key)
        if found is None:
            if plan.request.world != self.world:
                raise InternalError(f"{plan.request.name} on a group of {self.world}")
            room = fits(plan.request, self.slots, plan.algorithm)
            if not room.accepted:
                raise InternalError(f"{plan.request.name}: {room.reasons[0].message}")
            pieces = cut(plan.request, plan.algorithm, self.rank, self.slots)
            found = [(self._call(plan, piece), piece) for piece in pieces]
            self._built[key], self._names[plan.plan_id] = found, plan.request.name
        return found

    def fill(
        self,
        call: Call,
        piece: Piece,
        request: Request,
        given: Tensor,
        out: Tensor,
        side: Side | None,
        rows: Rows | None,
    ) -> None:
        """Put the tensors of this run into a call."""
        shift = piece.out_shift * call.width
        call.budget_ns = int(self.budget_s * 1e9)
        call.input = given.data_ptr()
        call.output = out.data_ptr() + shift
        if (request.side_int32 > 0) != (side is not None):
            raise InternalError(f"{request.name} was planned for {request.side_int32} counts")
        if side is not None:  # with the first piece, once
            call.side = request.side_int32 if piece.in_begin[0] == 0 else 0
            call.side_in, call.side_out = side.given.data_ptr(), side.summed.data_ptr()
        if (request.epilogue is None) != (rows is None):
            raise InternalError(f"{request.name}: epilogue planned or given, not both")
        if rows is not None:
            call.residual = rows.residual.data_ptr() + shift
            call.weight = rows.weight.data_ptr()
            call.normed = rows.normed.data_ptr() + shift

    def _call(self, plan: CommPlan, piece: Piece) -> Call:
        request = plan.request
        call = Call(
            rank=self.rank,
            world=self.world,
            kind=piece.kind,
            type=element_type(request),
            width=ELEMENT_BYTES[request.dtype],
            shared=self.slots.shared,
            same=piece.same,
            stride=piece.stride,
            second=piece.second,
            slot_bytes=self.slots.bytes,
            plan=plan.plan_id,
            error=self._error,
            state=self._state,
        )
        for name in ("in_begin", "in_len", "out_begin", "out_len"):
            getattr(call, name)[: self.world] = getattr(piece, name)
        call.slab[: self.world] = self._slabs
        if request.epilogue is not None:
            call.hidden, call.eps = request.epilogue.hidden, request.epilogue.eps
        return call


def result_count(request: Request, rank: int) -> int:
    """Elements that `rank` holds afterwards."""
    if request.op is Op.REDUCE_SCATTER:
        begin, end = shard(request.count, request.world, rank)
        return end - begin
    return request.count


def given_count(request: Request, rank: int) -> int:
    """Elements that `rank` brings."""
    if request.op is Op.ALL_GATHER:
        begin, end = shard(request.count, request.world, rank)
        return end - begin
    return request.count


def checked(
    request: Request, rank: int, given: Tensor, out: Tensor | None, device: str = "cpu"
) -> Tensor:
    """The output tensor, once both tensors are what the plan was made for.

    Raises:
        InternalError: type, length, contiguity or device is another.
    """
    dtype = DTYPES[request.dtype]
    if out is None:
        out = torch.empty(result_count(request, rank), dtype=dtype, device=given.device)
        if result_count(request, rank) == given.numel():
            out = out.view(given.shape)
    for name, tensor, count in (
        ("input", given, given_count(request, rank)),
        ("output", out, result_count(request, rank)),
    ):
        if tensor.dtype != dtype or tensor.numel() != count or not tensor.is_contiguous():
            raise InternalError(
                f"{request.name}: {name} is {tensor.dtype} of {tensor.numel()} elements, "
                f"{'contiguous' if tensor.is_contiguous() else 'not contiguous'}; "
                f"{request.dtype} of {count}, contiguous, was planned"
            )
        if tensor.device.type != device:
            raise InternalError(f"{request.name}: {name} is on {tensor.device}, not on {device}")
    return out
