"""Rows that were rounded ahead of an expert's first product, as ranks send them to each other.

An implementation that rounds its rows before the first product may be given them rounded: half the
bytes, and the same numbers, for rounding looks at one group of one row. Whoever was not made for
them reads them back (`as_read`); rounding once more changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.formats.activation import quantise_fp8


class Order(StrEnum):
    """Where a row's channels stand, as the kernel that rounded it reads them."""

    NATURAL = "natural"
    MIXED = "mixed"  # in 128 channels, channel 16 c + 4 i + j at 32 i + 4 c + j
    PARTED = "parted"  # in eight channels, channel 2 c + i at 4 i + c


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows [T, D] of `dtype`: `elements` [T, D] e4m3 in `order`, times `scales`
    [T, ceil(D / group)] float32."""

    elements: Tensor
    scales: Tensor
    dtype: torch.dtype
    group: int = 128
    order: Order = Order.NATURAL

    @property
    def shape(self) -> torch.Size:
        return self.elements.shape

    @property
    def device(self) -> torch.device:
        return self.elements.device

    def read(self) -> Tensor:
        """The rows in their own type, which holds them exactly."""
        rows, width = self.shape
        found = self.elements.to(torch.float32)
        if self.order is Order.MIXED:
            found = found.view(rows, width // 128, 4, 8, 4).transpose(2, 3)
        elif self.order is Order.PARTED:
            found = found.view(rows, width // 8, 2, 4).transpose(2, 3)
        scales = self.scales.repeat_interleave(self.group, dim=1)[:, :width]
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        return (found.reshape(rows, width).to(kind) * scales.to(kind)).to(self.dtype)


Rows = Tensor | Rounded


def as_read(x: Rows) -> Tensor:
    return x.read() if isinstance(x, Rounded) else x


def rounded_rows(x: Tensor, group: int) -> Rounded:
    """x [T, D], rounded as `rounding.round_activations` does."""
    width = x.shape[-1]
    elements, scales = quantise_fp8(F.pad(x, (0, -width % group)), group)
    return Rounded(elements[:, :width].contiguous(), scales, x.dtype, group)
