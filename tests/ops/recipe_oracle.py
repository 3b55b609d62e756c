"""The arithmetic of DeepSeek-V4's FP8 and FP4 products, spelled out on stored codes.

Written from the published kernels' description, block by block and without the project's codecs:
activations become e4m3 codes with a power-of-two scale per group, every block of K adds
``(codes . codes) * scale_x * scale_w`` to the sum. float64, so the sums are exact to about 1e-15.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metainfer.formats.block_codecs import BlockTensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


def weight_of(tensor: BlockTensor) -> Tensor:
    """Values [N, K] float64, element by element."""
    fmt, (n, k) = tensor.format, tensor.shape
    if fmt.element == "e4m3":
        codes = tensor.data.view(torch.float8_e4m3fn).double()
    else:
        low, high = tensor.data & 15, tensor.data >> 4
        codes = E2M1[torch.stack((low, high), dim=-1).flatten(1).long()]
    if fmt.scale == "F8_E8M0":
        scale = torch.exp2(tensor.scale.double() - 127)
    elif fmt.scale == "F32":
        scale = tensor.scale.double()
    else:
        stored, second = tensor.scale.view(torch.float8_e4m3fn).float(), tensor.second
        assert second is not None
        scale = (stored * second if fmt.second == "multiply" else stored / second).double()
    rows = torch.arange(n) // fmt.block[0]
    columns = torch.arange(k) // fmt.block[1]
    # The stored value is a float32: one rounding where the scale is not a power of two.
    return (codes * scale[rows][:, columns]).float().double()


def rounded(x: Tensor, group: int) -> Tensor:
    """e4m3 per `group` channels of each row, the last one shorter; float64."""
    out = torch.empty_like(x, dtype=torch.float64)
    for first in range(0, x.shape[1], group):
        block = x[:, first : first + group].double()
        for row in range(x.shape[0]):
            amax = max(float(block[row].abs().max()), 1e-4)
            scale = 2.0 ** math.ceil(math.log2(amax / 448))
            codes = (block[row] / scale).float().to(torch.float8_e4m3fn).double()
            out[row, first : first + group] = codes * scale
    return out


def product(x: Tensor, weights: list[BlockTensor], group: int) -> Tensor:
    """``round(x) @ Wᵀ`` in float64."""
    return rounded(x, group) @ torch.cat([weight_of(w) for w in weights]).T
