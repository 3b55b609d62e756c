"""The checkpoint's matrices, read and decoded apart from the engine that is verified."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from metainfer.executor.loading import tensor_source
from metainfer.formats.block_codecs import BlockTensor
from metainfer.formats.quant import Stored, dequantise
from metainfer.models.arch import Arch, WeightSpec
from metainfer.ops.case import Weight
from metainfer.ops.linear.packed import PackedWeight, pack_dense
from metainfer.planner.opening import OpenedModel

KEPT_BYTES = 2 << 30


class Weights:
    """Matrices by (site, number of the layer among those with the site), one use after the other.

    Decoded ones are kept as long as they fit `KEPT_BYTES`.
    """

    def __init__(self, model: OpenedModel, arch: Arch, device: torch.device) -> None:
        """`device`: where random weights are drawn, since another device draws others."""
        self.device = device
        self._source = tensor_source(model, device)
        self._by_site: dict[str, list[WeightSpec]] = {}
        for spec in arch.packed_weights():
            self._by_site.setdefault(spec.site, []).append(spec)
        self._kept: OrderedDict[tuple[str, torch.dtype], PackedWeight] = OrderedDict()

    def specs(self) -> list[WeightSpec]:
        """All of them, site by site."""
        return [spec for listed in self._by_site.values() for spec in listed]

    def spec(self, use: tuple[str, int]) -> WeightSpec:
        site, number = use
        return self._by_site[site][number]

    def raws(self, use: tuple[str, int]) -> list[Stored]:
        """As the checkpoint holds them."""
        return [self._source.read(name) for name in self.spec(use).tensors]

    def as_case(self, use: tuple[str, int]) -> Weight:
        """As an op's case holds a weight."""
        spec = self.spec(use)
        return Weight(tuple(self.raws(use)), self._bias(spec), spec.role)

    def dense(self, use: tuple[str, int], dtype: torch.dtype, device: torch.device) -> PackedWeight:
        """Decoded and rounded to `dtype`, on `device`."""
        spec = self.spec(use)
        key = (spec.name, dtype)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        raws = self.raws(use)
        bias = self._bias(spec)
        packed = pack_dense(raws, bias, dtype=dtype, device=device, site=use[0])
        first = raws[0]
        if isinstance(first, BlockTensor):
            packed = _with_format(packed, first)
        self._kept[key] = packed
        while sum(w.nbytes for w in self._kept.values()) > KEPT_BYTES and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return packed

    def _bias(self, spec: WeightSpec) -> Tensor | None:
        if not spec.bias:
            return None
        parts: Sequence[Stored] = [self._source.read(name) for name in spec.bias]
        return torch.cat([dequantise(part, torch.float32) for part in parts]).double()


def _with_format(packed: PackedWeight, first: BlockTensor) -> PackedWeight:
    from dataclasses import replace

    return replace(packed, format=first.format)
