"""Float32 linear layers on CPU with the weight reordered once for oneDNN.

`F.linear` reorders (or strides through) the weight at every call; here it is held in the blocked
format that oneDNN picks for it. The operators are private to torch, so this is the only file that
names them, and `probe` checks them by number before the selector may choose the layout.

The blocked weight cannot be indexed: an embedding is packed apart (`onednn_layout`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.core.verdict import ACCEPT, Verdict, reject, require
from metainfer.formats.quant import Stored
from metainfer.ops.linear.packed import PackedWeight, pack_dense

LAYOUT = "onednn-f32@1"


def _reorder(weight: Tensor) -> Tensor:
    """`weight` [N, K] in oneDNN's blocked format (an opaque tensor)."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


@functools.cache
def probe() -> Verdict:
    """Whether this torch has the operators and they compute ``x @ Wᵀ + bias``. Never raises."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return reject("onednn", "this torch was built without oneDNN")
    missing = [
        name
        for name in ("_reorder_linear_weight", "_linear_pointwise")
        if not hasattr(torch.ops.mkldnn, name)
    ]
    if missing:
        return reject("onednn", f"this torch lacks mkldnn.{', mkldnn.'.join(missing)}")
    random = torch.Generator().manual_seed(20)
    weight, bias = torch.randn(70, 96, generator=random), torch.randn(70, generator=random)
    verdict = ACCEPT
    for rows in (1, 5):
        x = torch.randn(rows, 96, generator=random)
        expected = x.double() @ weight.double().T + bias.double()
        try:
            found = _multiply(x, _reorder(weight), bias)
        except (RuntimeError, TypeError) as error:
            return reject("onednn", f"oneDNN's linear refuses: {str(error).split('. ')[0]}")
        worst = float((found.double() - expected).abs().max())
        verdict &= require(
            worst < 1e-4,  # NaN fails too
            "onednn",
            f"oneDNN's linear is wrong by {worst:.1e} for {rows} rows",
            error=worst,
        )
    return verdict


def pack(
    raws: Sequence[Stored],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    site: str = "",
) -> PackedWeight:
    """``onednn-f32@1``: `raws` decoded, laid end to end along N and reordered."""
    if dtype != torch.float32 or torch.device(device).type != "cpu":
        raise InternalError(f"{LAYOUT} serves float32 on cpu, not {dtype} on {device}")
    dense = pack_dense(raws, bias, dtype=dtype, device=device, site=site)
    data = {"weight": _reorder(dense.data["weight"])}
    return PackedWeight(LAYOUT, dense.shape, data, dense.bias, site)


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x @ Wᵀ + bias``: x float32 [T, K] -> float32 [T, N]."""
    if x.shape[0] == 0:
        return x.new_empty((0, weight.shape[0]))
    return _multiply(x, weight.data["weight"], weight.bias)
