"""What a random tensor is like: shape, storage and distribution, before any number. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.formats.blocks import FORMATS, BlockFormat
from metainfer.formats.safetensors_writer import Entry


@dataclass(frozen=True, slots=True)
class Drawn:
    """A tensor to be drawn: normal numbers of `mean` and `deviation`, or ids.

    `scheme`: a dense scheme, or a `BlockFormat`'s name. `below`: integers from 0 up to it, all
    different within a row.
    """

    shape: tuple[int, ...]
    scheme: str
    mean: float = 0.0
    deviation: float = 0.02
    below: int = 0

    @property
    def format(self) -> BlockFormat | None:
        """The block format, or None for dense storage."""
        return FORMATS.get(self.scheme)

    def entries(self, name: str) -> tuple[Entry, ...]:
        """The stored tensors of the matrix called `name`: one, or elements and scales."""
        fmt = self.format
        if fmt is None:
            return (Entry(name, self.scheme, self.shape),)
        n, k = self.shape
        return (
            Entry(fmt.leaf(name, fmt.data_leaf), fmt.data_dtype, fmt.data_shape(n, k)),
            Entry(fmt.leaf(name, fmt.scale_leaf), fmt.scale, fmt.scale_shape(n, k)),
        )
