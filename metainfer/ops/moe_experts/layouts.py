"""Packing of a layer's experts: one matrix of all, in the model's type or as stored.

Both hold [E 2F, D] (w1 then w3 of each expert in turn) or [E D, F] (w2). As stored, the tensors are
those of `linear.stored`, one after the other, so that `part` finds an expert's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from metainfer.core.errors import ModelError
from metainfer.formats.quant import Stored
from metainfer.ops.linear import packed, stored
from metainfer.ops.linear.packed import PackedWeight

DENSE = "experts-dense@1"
STORED = "experts-stored@1"


def pack_dense(
    raws: Sequence[Stored],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    site: str = "",
) -> PackedWeight:
    """``experts-dense@1``: as ``dense@1``, [E 2F, D] or [E D, F] in the model's type."""
    held = packed.pack_dense(raws, bias, dtype=dtype, device=device, site=site)
    return dataclasses.replace(held, layout=DENSE)


def pack_stored(
    raws: Sequence[Stored],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    site: str = "",
) -> PackedWeight:
    """``experts-stored@1``: elements and scales stacked over the experts, all in one format.

    Raises:
        ModelError: the tensors differ in format or in rows, as no model's experts do.
    """
    held = stored.pack(raws, bias, dtype=dtype, device=device, site=site)
    if len(set(held.parts)) > 1:
        raise ModelError(
            f"the experts of {site or 'one site'} have {sorted(set(held.parts))} rows.",
            "The checkpoint does not match its configuration.",
            code="bad_shape",
        )
    return dataclasses.replace(held, layout=STORED)
