"""Adapters from their files to the device: pairs beside each packed matrix, checked finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from metainfer.core.errors import ModelError
from metainfer.executor.loading import RankPart, Sharding, shard_of_tensor
from metainfer.formats.adapters import WEIGHTS_NAME, Adapter
from metainfer.formats.checkpoint import Checkpoint
from metainfer.formats.extents import Shard
from metainfer.formats.quant import dequantise
from metainfer.models.arch import Cut, WeightSpec
from metainfer.models.common.adapters import AdapterSet, AdapterSite
from metainfer.models.common.lowrank import LowRankPairs


def load_adapters(
    adapters: AdapterSet,
    own: AdapterSet,
    specs: Sequence[WeightSpec],
    shards: Sequence[Sharding],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[list[dict[str, LowRankPairs]], int]:
    """The pairs by `WeightSpec.name`, in the model's dtype, and the bytes that they hold.

    `adapters` of the whole model, `own` of one rank; one mapping for each of `shards`, the parts of
    the matrices `specs` that are here. Parts share what their matrices' cut leaves whole.

    Raises:
        ModelError: a file changed since its header was read, or holds NaN or infinity.
    """
    files = [Checkpoint.open(each.folder / WEIGHTS_NAME) for each in adapters.adapters]
    named, held = {spec.name: spec for spec in specs}, 0
    parts: list[dict[str, LowRankPairs]] = [{} for _ in shards]
    for site, mine in zip(adapters.sites, own.sites, strict=True):
        whole = _empty(site, len(files), dtype)
        for place, (adapter, file) in enumerate(zip(adapters.adapters, files, strict=True)):
            _fill(whole, site, place, adapter, file)
        whole = replace(whole, scale=whole.scale.to(device))
        spec, moved = named[site.weight], dict[int, Tensor]()
        cuts = [_cut(whole, site, mine, spec, shard(spec)) for shard in shards]
        for tensor in (tensor for cut in cuts for tensor in (cut.a, cut.b)):
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(device)
        for part, cut in zip(parts, cuts, strict=True):
            part[site.weight] = replace(cut, a=moved[id(cut.a)], b=moved[id(cut.b)])
        held += whole.scale.nbytes + sum(tensor.nbytes for tensor in moved.values())
    for file in files:
        file.close()
    return parts, held


def _cut(
    whole: LowRankPairs, site: AdapterSite, own: AdapterSite, spec: WeightSpec, mine: RankPart
) -> LowRankPairs:
    """One rank's part beside its part of a matrix. A product's rows are those of B, its columns
    those of A; the sum over ranks that the columns' parts need is that of the matrix's own."""
    if mine.parts == 1:
        return whole
    if mine.cut is Cut.COLUMNS:
        shard = shard_of_tensor(site.inner, mine, spec, 0, spec.tensors[0])
        return replace(whole, a=_narrow(whole.a, 3, shard))
    found, at = [], 0
    for module, (_, width) in zip(site.modules, site.spans, strict=True):
        name = f"{module}.weight"
        shard = shard_of_tensor(width, mine, spec, spec.tensors.index(name), name)
        found.append(_narrow(whole.b[at : at + width], 0, shard))
        at += width
    return replace(whole, b=torch.cat(found), spans=own.spans)


def _narrow(tensor: Tensor, dim: int, shard: Shard) -> Tensor:
    """A shard of one dimension; zeros where the rank's part is filled up."""
    shape = list(tensor.shape)
    shape[dim] = shard.extent.executed
    found = tensor.new_zeros(shape)
    held = shard.extent.logical
    found.narrow(dim, 0, held).copy_(tensor.narrow(dim, shard.start, held))
    return found


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
