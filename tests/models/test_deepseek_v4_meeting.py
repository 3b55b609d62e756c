"""Tokens of several domains at the experts: what is sent, and that rounding it first changes no
bit. Two domains that have the same rows are stood in for by one peer that doubles what it is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from metainfer.comm.peers import Alone, Ranks
from metainfer.comm.side import Done, Pending
from metainfer.formats.block_codecs import encode
from metainfer.formats.blocks import FORMATS
from metainfer.models.arch import TOGETHER
from metainfer.models.common.lanes import alone
from metainfer.models.common.meeting import send_rounded, send_rows
from metainfer.models.deepseek_v4.model import DeepSeekV4Model
from metainfer.ops.activation.ref import swiglu_clamp
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.ref import linear
from metainfer.ops.moe_experts import torch_experts
from metainfer.ops.moe_experts.layouts import pack_stored
from metainfer.ops.moe_experts.rounded import Rounded, rounded_rows

EXPERTS, D, F = 8, 192, 64
"""Experts of both ranks, channels (not whole groups), hidden channels."""


@dataclass
class Twice(Alone):
    """One of two domains; the other has the same rows and adds nothing to sums. `sent`: types and
    bytes of a row of each message; `numbers`: of the last, columns that are experts'."""

    rank: int = 0
    size: int = 2
    sent: list[tuple[torch.dtype, int]] = field(default_factory=list)
    numbers: int = 0

    def start_rows(self, x: Tensor, numbers: int = 0) -> Pending[Tensor]:
        self.numbers = numbers
        self.sent.append((x.dtype, x[0].nbytes if len(x) else 0))
        return Done(torch.cat((x, x)))

    def start_sum_rows(self, x: Tensor) -> Pending[Tensor]:
        return Done(x.chunk(2)[0].clone())


def experts(name: str, count: int, rows: int, width: int, seed: int) -> PackedWeight:
    drawn = torch.Generator().manual_seed(seed)
    raws = [
        encode(torch.randn(rows, width, generator=drawn) * width**-0.5, FORMATS[name])
        for _ in range(count)
    ]
    return pack_stored(raws, dtype=torch.float32)


def shared(rows: int, width: int, seed: int) -> PackedWeight:
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return PackedWeight("dense@1", (rows, width), {"weight": weight})


@pytest.mark.parametrize("name", ["mxfp4", "fp8_128"])
def test_rows_are_rounded_from_so_many_on_and_no_bit_differs(name: str, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(7, D, generator=drawn)
    ids = torch.stack([torch.randperm(EXPERTS, generator=drawn)[:2] for _ in range(7)]).int()
    weights = torch.rand(7, 2, generator=drawn)
    layer: Any = SimpleNamespace(
        w13=experts(name, EXPERTS, F, D, seed), w2=experts(name, EXPERTS // 2, D, F, seed + 1),
        shared13=shared(2 * F, D, seed), shared2=shared(D, F, seed + 1),
    )  # fmt: skip
    found, sent = {}, {}
    for least, rounding in ((0, True), (8, True), (7, True), (1, True), (2, False)):
        peer = Twice()
        model: Any = object.__new__(DeepSeekV4Model)
        model.arch = SimpleNamespace(limit=1.0, clamp_shared=True, experts=EXPERTS)
        model.ranks, model.rounded_from = Ranks(domains=peer, expert=peer), least
        model.others, model.numbers = [], model._numbers(torch.device("cpu"))
        ops: Any = SimpleNamespace(
            rounding=lambda site: torch_experts.rounded if rounding else None,  # noqa: B023
            moe_experts=torch_experts.recipe, linear=linear, swiglu_clamp=swiglu_clamp,
        )  # fmt: skip
        found[least] = alone(model._over_domains(x, ids, weights, layer, ops))
        sent[least] = peer.sent
    as_they_are = [(torch.int32, 4 * D + 16)]
    rounded = [(torch.uint8, D), (torch.int32, 16 + 4 * -(-D // 128))]
    assert sent == {least: rounded if least in (7, 1) else as_they_are for least in found}
    assert all(torch.equal(each, found[0]) for each in found.values())
    assert found[0].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_arrives_is_what_every_domain_sent(dtype: torch.dtype, seed: int) -> None:
    """Routes are one message of bits, with scales or few rows; all come back as they were, NaN and
    -0.0 too, and of no rows nothing."""
    drawn = torch.Generator().manual_seed(seed)
    for rows in (0, 5, TOGETHER, TOGETHER + 1):
        x = torch.randn(rows, 300, generator=drawn).to(dtype) * 1e3
        ids = torch.randint(-1, 9, (rows, 3), generator=drawn).int()
        weights = torch.rand(rows, 3, generator=drawn).to(dtype)
        own, peer = rounded_rows(x, 128), Twice()
        weights[:1] = torch.tensor([-0.0, math.nan, math.inf])
        came, numbers, shares = send_rounded(peer, own, ids, weights)()
        assert isinstance(came, Rounded) and came.scales.is_contiguous()
        assert torch.equal(came.read(), torch.cat((own.read(), own.read())))
        assert torch.equal(numbers, torch.cat((ids, ids)))
        assert_same_bits(shares, torch.cat((weights, weights)))
        assert len(peer.sent) == 2 and peer.numbers == 3
        peer = Twice()
        plain = send_rows(peer, x, ids, weights)()
        assert len(peer.sent) == (1 if rows <= TOGETHER else 2)
        for mine, sent in zip(plain, (x, ids, weights), strict=True):
            assert isinstance(mine, Tensor) and mine.is_contiguous()
            assert_same_bits(mine, torch.cat((sent, sent)))


def assert_same_bits(found: Tensor, sent: Tensor) -> None:
    assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
    assert torch.equal(found.view(torch.uint8), sent.view(torch.uint8))
