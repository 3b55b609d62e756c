"""The Gluon forms of the MXFP4 expert product on the host: their rings against float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gluon_model import loaded, value
from torch import Tensor

from metainfer.ops.moe_experts import tiles

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
EXPERTS, TOP, TOKENS = 3, 2, 9


def _asm(text: str, operands: str, args: list[Any], dtype: Any, **more: Any) -> Any:
    """What the two pieces of PTX mean (`test_unpack` runs the first by instructions)."""
    if text.startswith("mov.b32"):  # four times the same word: its bytes
        return value(args[0][:, ::4].contiguous().view(torch.int8))
    words, four, ref, pick = (part.long() for part in torch.broadcast_tensors(*args))
    nibbles = torch.stack([words >> 4 * i & 15 for i in range(8)], -1)
    scale = four >> 8 * (pick - 0x4440) & 255
    sizes = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1, 1)
    codes = (sizes * torch.exp2((scale - ref + 6).float())[..., None]).to(torch.float8_e4m3fn)
    out = codes.contiguous().view(torch.int32)  # [rows, words, half of a word]
    low, high = out[:, 0::2].flatten(1), out[:, 1::2].flatten(1)
    return value(low), value(high)


HERE = Path(tiles.__file__).parent
PIPELINED = loaded(HERE / "triton_pipelined.py", "triton_wgmma", asm=_asm)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than such small products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _mixed(x: Tensor) -> Tensor:
    """Channel 16 c + 4 i + j of a block of 128 at 32 i + 4 c + j."""
    return x.view(len(x), -1, 8, 4, 4).transpose(2, 3).reshape(len(x), -1)


class Work:
    """Pairs of three experts, the middle one without any; weights, and both products' truth."""

    def __init__(self, k: int, n: int, up: bool, seed: int = 5) -> None:
        g = torch.Generator().manual_seed(seed)
        self.k, self.n, self.up, rows = k, n, up, EXPERTS * n
        packed = torch.randint(0, 256, (rows, k // 2), generator=g).to(torch.uint8)
        scales = torch.randint(118, 130, (rows, k // 32), generator=g)
        scales[:, 0] = 129  # the largest of its row; others down to 2^11 less
        scales = (scales + torch.randint(-3, 4, (rows, 1), generator=g)).to(torch.uint8)
        self.refs = scales.amax(1)
        self.words, self.scales = packed.view(torch.int32), scales.view(torch.int32)
        nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
        dense = (E2M1[nibbles & 7] * torch.where(nibbles > 7, -1, 1)).double()
        dense *= torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
        ids = torch.tensor([[0, 2]] * TOKENS)
        ids[3] = torch.tensor([2, -1])
        flat = ids.flatten()
        live = int((flat >= 0).sum())
        self.order = torch.sort(torch.where(flat < 0, 99, flat), stable=True).indices.int()
        sources = TOKENS if up else live
        q = torch.randn(sources, k, generator=g).mul(100).clamp(-448, 448)
        q = q.to(torch.float8_e4m3fn)
        steps = torch.randint(-3, 4, (sources, k // 128), generator=g)
        self.q_scales = torch.exp2(steps.float())
        x = q.double() * self.q_scales.double().repeat_interleave(128, 1)
        self.q = _mixed(q.float()).to(torch.float8_e4m3fn)
        self.routes = torch.rand(TOKENS * TOP, generator=g)
        self.want = torch.full((TOKENS * TOP, n // 2 if up else n), torch.nan).double()
        for place in range(live):
            pair = int(self.order[place])
            matrix = dense.view(EXPERTS, n, k)[flat[pair]]
            result = matrix @ x[pair // TOP if up else place]
            if up:
                gate, lift = result.chunk(2)
                gate, lift = gate.clamp(max=2000.0), lift.clamp(-2000.0, 2000.0)
                result = torch.nn.functional.silu(gate) * lift * self.routes[pair]
            self.want[place if up else pair] = result
        counts = [int((flat == e).sum()) for e in range(EXPERTS)]
        self.counts = [(e, c) for e, c in enumerate(counts) if c]

    def table(self, m: int) -> Tensor:
        """Blocks of up to `m` pairs; two more hold none."""
        rows, first = [], 0
        for expert, count in self.counts:
            rows += [[expert, first + i, min(m, count - i)] for i in range(0, count, m)]
            first += count
        return torch.tensor([*rows, [7, 7, 0], [7, 7, 0]], dtype=torch.int32)

    def run(self, kernel: Any, bn: int, m: int, *tail: Any) -> Tensor:
        table, out = self.table(m), torch.full(self.want.shape, torch.nan)
        arguments = (self.q, self.q_scales, self.order, table, self.routes, self.words)
        kernel[self.n // bn, len(table)](
            *arguments, self.scales, self.refs, out, 2000.0, self.k, self.n, TOP, self.up, bn, m,
            *tail,
        )  # fmt: skip
        return out


def _close(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())  # a pair of no expert is not written
    assert float((got - want).nan_to_num().norm() / want.nan_to_num().norm()) < 1e-5


@pytest.mark.parametrize("k", [128, 256, 384, 1152, 1664])
@pytest.mark.parametrize("ring", [4, 8])
def test_widths_that_do_not_fill_a_ring(k: int, ring: int) -> None:
    """`tp8` of V4-Flash multiplies 256 hidden channels: these took a form 2 to 4 times slower."""
    work = Work(k, 32, False)
    _close(work.run(PIPELINED.pipelined_kernel, 32, 8, 8, ring, 1, True), work.want)


@pytest.mark.parametrize("wgmma", [True, False])
def test_gate_and_up_of_narrow_experts(wgmma: bool) -> None:
    work = Work(640, 64, True)
    for m, least in ((8, 8), (16, 8)):
        _close(work.run(PIPELINED.pipelined_kernel, 32, m, least, 4, 1, wgmma), work.want)
