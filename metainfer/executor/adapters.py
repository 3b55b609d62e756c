"""Adapters from their files to the device: pairs beside each packed matrix, checked finite."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.core.errors import ModelError
from metainfer.formats.adapters import WEIGHTS_NAME, Adapter
from metainfer.formats.checkpoint import Checkpoint
from metainfer.formats.quant import dequantise
from metainfer.models.common.adapters import AdapterSet, AdapterSite
from metainfer.models.common.lowrank import LowRankPairs


def load_adapters(
    adapters: AdapterSet, *, dtype: torch.dtype, device: torch.device
) -> dict[str, LowRankPairs]:
    """The pairs by `WeightSpec.name`, in the model's dtype.

    Raises:
        ModelError: a file changed since its header was read, or holds NaN or infinity.
    """
    files = [Checkpoint.open(each.folder / WEIGHTS_NAME) for each in adapters.adapters]
    loaded = {}
    for site in adapters.sites:
        pairs = _empty(site, len(files), dtype)
        for place, (adapter, file) in enumerate(zip(adapters.adapters, files, strict=True)):
            _fill(pairs, site, place, adapter, file)
        loaded[site.weight] = LowRankPairs(
            site.site,
            pairs.a.to(device),
            pairs.b.to(device),
            pairs.scale.to(device),
            site.spans,
        )
    for file in files:
        file.close()
    return loaded


def _empty(site: AdapterSite, count: int, dtype: torch.dtype) -> LowRankPairs:
    """Zeros on the host: what an adapter lacks adds nothing."""
    parts = len(site.modules)
    scales = torch.float64 if dtype == torch.float64 else torch.float32
    return LowRankPairs(
        site.site,
        torch.zeros(count, parts, site.rank, site.inner, dtype=dtype),
        torch.zeros(site.width, count, site.rank, dtype=dtype),
        torch.zeros(count, parts, dtype=scales),
        site.spans,
    )


def _fill(
    pairs: LowRankPairs, site: AdapterSite, place: int, adapter: Adapter, file: Checkpoint
) -> None:
    at = 0
    for part, (module, (_, width)) in enumerate(zip(site.modules, site.spans, strict=True)):
        pair = adapter.modules.get(module)
        if pair is not None:
            a = _values(file, pair.a.name, pair.a.shape, adapter, pairs.a.dtype)
            b = _values(file, pair.b.name, pair.b.shape, adapter, pairs.b.dtype)
            pairs.a[place, part, : pair.rank] = a
            pairs.b[at : at + width, place, : pair.rank] = b
            pairs.scale[place, part] = pair.scale
        at += width


def _values(
    file: Checkpoint, name: str, shape: tuple[int, ...], adapter: Adapter, dtype: torch.dtype
) -> Tensor:
    raw = file.read(name)
    if raw.shape != shape:
        raise ModelError(
            f"adapter {adapter.name!r}: {name} changed while it was being loaded.",
            "Do not change an adapter's files while they are loaded; start again.",
            code="file_changed",
        )
    values = dequantise(raw, dtype)
    if not torch.isfinite(values).all():
        raise ModelError(
            f"adapter {adapter.name!r}: {name} holds NaN or infinity in {dtype}.",
            "Its training diverged, or the model's type is too narrow for it; see --dtype.",
            code="bad_adapter",
        )
    return values
