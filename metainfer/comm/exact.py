"""The canonical sum: what every exact collective gives, bit for bit.

Wide accumulation in rank order from rank 0 on (float32; float64 in float64; int32 wraps), one
rounding to the element type, ties to even. A NaN in the result is the one quiet NaN of its type.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LANES, GROUP = 256, 8


def canonical_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum of equal-shaped tensors, one per rank, in that order."""
    kind = parts[0].dtype
    if len(parts) == 2:  # torch adds wide and rounds once, in one pass over memory
        result = parts[0] + parts[1]
    else:
        wide = kind if kind in (torch.float64, torch.int32) else torch.float32
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part.to(wide)
        result = total.to(kind)
    return _settled(result) if kind.is_floating_point else result


def _settled(found: Tensor) -> Tensor:
    """`found` with every NaN as the one of its type: processors keep different payloads."""
    return found.masked_fill_(found.isnan(), float("nan"))


def canonical_add_rmsnorm(
    y: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """What an epilogue gives for the reduced y [rows, hidden]: ``(normed, residual + y)``.

    The mean of squares has a fixed order: element i of a row belongs to lane ``i // 8 % 256``,
    which adds its squares one after another; lanes are then added pairwise, halving their number.
    """
    rows, hidden = y.shape
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    total = _settled((y.to(wide) + residual.to(wide)).to(y.dtype))
    width = LANES * GROUP
    padded = torch.zeros(rows, -(-hidden // width) * width, dtype=wide)
    padded[:, :hidden] = total.to(wide).square()
    squares = padded.view(rows, padded.shape[1] // width, LANES, GROUP)
    lanes = torch.zeros(rows, LANES, dtype=wide)
    for turn in range(squares.shape[1]):
        for place in range(GROUP):
            lanes += squares[:, turn, :, place]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    mean = lanes / torch.tensor(hidden, dtype=wide)
    shifted = mean + torch.tensor(eps, dtype=torch.float32).to(wide)
    # NumPy's root is correctly rounded; torch's vector one of float32 is not, in one of five.
    scale = 1 / torch.from_numpy(np.sqrt(shifted.numpy()))
    return _settled((total.to(wide) * scale * weight.to(wide)).to(y.dtype)), total
