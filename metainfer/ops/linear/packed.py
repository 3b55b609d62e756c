"""A weight in the one form that the chosen kernels read, and the packing of the dense layout.

`embed` and `linear` share packed weights: a tied embedding is held once and read by both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from metainfer.core.errors import InternalError, ModelError
from metainfer.formats.blocks import BlockFormat
from metainfer.formats.quant import Stored, dequantise


@dataclasses.dataclass(frozen=True, slots=True)
class PackedWeight:
    """One matrix ``[N, K]`` as `layout` holds it.

    `data`: tensors by name, private to the layout (``dense@1``: ``weight`` [N, K]). `bias` [N] or
    None, in the model's dtype. `handle`: what a foreign library made of it (a C descriptor), when
    tensors alone do not say it; it is then what the kernels read. `site` names the use
    (``linear.qkv``): the run-time table dispatches by it, and a tied embedding is one storage
    under two sites (`at_site`).

    Layouts that keep what the checkpoint holds say more: `format`, how block-scaled elements are
    to be read (None: plain numbers); `parts`, the N of each tensor in order; `dtype`, the model's.
    """

    layout: str
    shape: tuple[int, int]
    data: Mapping[str, Tensor]
    bias: Tensor | None = None
    site: str = ""
    handle: object = None
    format: BlockFormat | None = None
    parts: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    def at_site(self, site: str) -> PackedWeight:
        """The same storage used elsewhere."""
        return dataclasses.replace(self, site=site)

    @property
    def nbytes(self) -> int:
        """Bytes held, bias included."""
        tensors = [*self.data.values()] + ([self.bias] if self.bias is not None else [])
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def joint_shape(raws: Sequence[Stored]) -> tuple[int, int]:
    """``(N, K)`` of `raws` laid end to end along N.

    Raises:
        ModelError: a tensor is not a matrix, or the widths differ.
    """
    if not raws:
        raise InternalError("a packed weight needs at least one tensor")
    for raw in raws:
        if len(raw.shape) != 2 or raw.shape[1] != raws[0].shape[1]:
            listed = ", ".join(str(list(other.shape)) for other in raws)
            raise ModelError(
                f"weights of shapes {listed} cannot be joined along their first dimension.",
                "The checkpoint does not match its configuration.",
                code="bad_shape",
            )
    return sum(raw.shape[0] for raw in raws), raws[0].shape[1]


def pack_dense(
    raws: Sequence[Stored],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    site: str = "",
) -> PackedWeight:
    """``dense@1``: one contiguous matrix ``[N, K]`` in the model's dtype on `device`.

    Quantised sources are decoded in float32 and rounded once to `dtype`.
    """
    n, k = joint_shape(raws)
    weight = torch.empty(n, k, dtype=dtype, device=device)  # [N, K]
    row = 0
    for raw in raws:
        weight[row : row + raw.shape[0]] = dequantise(raw, dtype)
        row += raw.shape[0]
    moved = bias.to(device=device, dtype=dtype) if bias is not None else None
    return PackedWeight("dense@1", (n, k), {"weight": weight}, moved, site)
