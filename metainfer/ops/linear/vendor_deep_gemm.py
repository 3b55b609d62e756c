"""`linear` on FP8 weights by DeepGEMM, for chunks of a prompt.

Its kernels are compiled by form at first use, and the form follows the number of rows. So rows are
padded to a few sizes, and the first call of a matrix compiles all up to its own: nothing is left to
compile once the largest chunk was warmed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.foreign import library
from metainfer.ops.linear.fp8 import quantise
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.tiles import foreign_rows


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x @ W^T`` in the recipe's arithmetic: x [T, K] bfloat16, ``stored@1`` FP8 weight [N, K],
    both multiples of 128 -> [T, N].

    Raises:
        UserError: the library cannot be imported or has no `fp8_gemm_nt`.
    """
    rows, n = x.shape[0], weight.shape[0]
    if rows == 0:
        return x.new_empty((0, n))
    elements = weight.data["elements"].view(torch.float8_e4m3fn)
    scales = weight.data["scales"]
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu).float()
    every = foreign_rows(rows)
    key = (x.device, *weight.shape)
    for size in every:
        if _COMPILED.get(key, 0) < size:
            _product(x.new_zeros((size, x.shape[1])), elements, scales)
            _COMPILED[key] = size
    padded = F.pad(x, (0, 0, 0, every[-1] - rows)) if every[-1] > rows else x
    return _product(padded, elements, scales)[:rows]


_COMPILED: dict[tuple[torch.device, int, int], int] = {}
"""The largest size whose kernels are compiled, by device, N and K."""


def _product(x: Tensor, elements: Tensor, scales: Tensor) -> Tensor:
    """x [M, K] bfloat16, e4m3 [N, K], float32 [N / 128, K / 128] -> [M, N]."""
    values, factors = quantise(x)
    out = torch.empty((x.shape[0], elements.shape[0]), dtype=x.dtype, device=x.device)
    # [M, K / 128] with neighbouring rows side by side, which is how the library wants them.
    _deep_gemm().fp8_gemm_nt((values, factors.T), (elements, scales), out)
    return out


@cache
def _deep_gemm() -> Any:
    return library("deep_gemm", "fp8_gemm_nt")
