"""Random tensors in the form in which a checkpoint would hold them, from a seed and their name.

Equal on every machine of one torch version and kind of device (a card draws other numbers than
the host). Block-scaled matrices are drawn as codes and scales, from tables of 65536 quantiles:
elements are those of a normal distribution, scales vary by a power of two from block to block, so
that one in the wrong place shows. Memory: one tensor and a bounded chunk.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.formats import elements
from metainfer.formats.block_codecs import BlockTensor
from metainfer.formats.blocks import BlockFormat
from metainfer.formats.drawn import Drawn
from metainfer.formats.quant import TORCH_DTYPES, RawTensor

CHUNK = 1 << 24
"""Elements drawn at once."""
_LEVELS = 1 << 16

# By element: deviation of the codes' values, exponent of the larger scale for a deviation of one,
# and how many of 256 blocks have it; the others have half. The product's deviation is one.
# e2m1: one code in 64 is the largest (6); e4m3: 448 lies at 5 deviations.
_PARTS = {"e2m1": (2.0, 54), "e4m3": (91.0, 192)}


class RandomSource:
    """Tensors of `draws` by name, on `device`."""

    def __init__(
        self, draws: Mapping[str, Drawn], seed: int, device: torch.device | None = None
    ) -> None:
        self.draws = draws
        self._seed = seed
        self._device = device or torch.device("cpu")

    def read(self, name: str) -> RawTensor | BlockTensor:
        drawn = self.draws[name]
        generator = torch.Generator(self._device)
        # One 32-bit number: the CPU generator ignores the upper half of a longer seed.
        generator.manual_seed(zlib.crc32(f"{self._seed}:{name}".encode()))
        fmt = drawn.format
        if fmt is not None:
            return _blocks(drawn, fmt, generator)
        if drawn.below:
            return RawTensor(drawn.scheme, drawn.shape, _distinct(drawn, generator))
        return RawTensor(drawn.scheme, drawn.shape, _normal(drawn, generator))


def undrawn(draws: Mapping[str, Drawn]) -> list[str]:
    """Schemes of `draws` that a `RandomSource` has no numbers for."""
    formed = ((each, each.format) for each in draws.values())
    return sorted({each.scheme for each, fmt in formed if fmt and not _has_numbers(each, fmt)})


def _has_numbers(drawn: Drawn, fmt: BlockFormat) -> bool:
    return fmt.scale == "F8_E8M0" and not drawn.mean


def _normal(drawn: Drawn, generator: torch.Generator) -> Tensor:
    device, dtype = generator.device, TORCH_DTYPES[drawn.scheme]
    result = torch.empty(drawn.shape, dtype=dtype, device=device)
    flat = result.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        values = torch.randn(part.shape, generator=generator, device=device) * drawn.deviation
        part.copy_(values + drawn.mean if drawn.mean else values)
    return result


def _distinct(drawn: Drawn, generator: torch.Generator) -> Tensor:
    """Ids below `drawn.below`, all different in a row: each is the r-th of those still free."""
    rows, width = drawn.shape
    if width > drawn.below:
        raise InternalError(f"{width} different ids below {drawn.below}")
    device, dtype = generator.device, TORCH_DTYPES[drawn.scheme]
    ids = torch.empty(drawn.shape, dtype=dtype, device=device)
    for column in range(width):
        free = drawn.below - column
        pick = torch.randint(free, (rows,), generator=generator, device=device, dtype=dtype)
        for taken in ids[:, :column].sort(dim=1).values.unbind(1):
            pick += pick >= taken
        ids[:, column] = pick
    return ids


def _blocks(drawn: Drawn, fmt: BlockFormat, generator: torch.Generator) -> BlockTensor:
    if not _has_numbers(drawn, fmt):
        raise InternalError(f"no {fmt.name} matrix of mean {drawn.mean} is drawn")
    n, k = drawn.shape
    spread, often = _PARTS[fmt.element]
    rows, width = fmt.data_shape(n, k)
    data = _look_up(_table(fmt.element, spread), rows * width, generator).reshape(rows, width)
    exponent = _exponent(drawn.deviation, spread, often)
    shape = fmt.scale_shape(n, k)
    coin = _words(shape[0] * shape[1], generator).view(torch.uint8)[: 2 * shape[0] * shape[1] : 2]
    scale = torch.where(coin < often, exponent + 127, exponent + 126).to(torch.uint8)
    return BlockTensor(fmt, (n, k), data, scale.reshape(shape))


def _exponent(deviation: float, spread: float, often: int) -> int:
    """The larger scale's exponent: the nearest to `deviation` that a power of two allows."""
    part = often / 256
    mixed = spread * (part + (1 - part) / 4) ** 0.5
    return round(float(torch.log2(torch.tensor(deviation / mixed))))


@lru_cache(maxsize=4)
def _table(element: str, spread: float) -> Tensor:
    """Stored bytes [65536] of equally likely draws; for e2m1 two independent nibbles."""
    if element == "e4m3":
        levels = (torch.arange(_LEVELS, dtype=torch.float64) + 0.5) / _LEVELS
        return elements.e4m3_encode(torch.special.ndtri(levels) * spread)
    levels = (torch.arange(256, dtype=torch.float64) + 0.5) / 256
    nibble = elements.e2m1_encode(torch.special.ndtri(levels) * spread)
    return (nibble[None, :] | (nibble[:, None] << 4)).flatten()


def _words(count: int, generator: torch.Generator) -> Tensor:
    """At least `count` random 16-bit words (int16)."""
    wide = torch.empty(-(-count // 4), dtype=torch.int64, device=generator.device)
    return wide.random_(-(2**63), None, generator=generator).view(torch.int16)


def _look_up(table: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` bytes of `table`, each at a random place."""
    device = generator.device
    result = torch.empty(count, dtype=torch.uint8, device=device)
    table = table.to(device)
    for start in range(0, count, CHUNK):
        part = result[start : start + CHUNK]
        words = _words(part.numel(), generator)[: part.numel()]
        if device.type == "cpu":  # numpy gathers by 16-bit places, six times as fast
            part.copy_(torch.from_numpy(table.numpy()[words.view(torch.uint16).numpy()]))
        else:
            part.copy_(table[words.to(torch.int32) & (_LEVELS - 1)])
    return result
