"""From a checkpoint (or a seed) to packed weights on the device, with progress.

Host memory: what one `WeightSpec` reads, and of a checkpoint's files not even that, for they are
mapped and let go. Names, shapes and schemes were checked against the arch when the model was
opened; values (scales out of range) are checked here. An error leaves nothing behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from metainfer.comm.peers import Place
from metainfer.core.errors import InternalError, ModelError
from metainfer.formats.block_codecs import BlockTensor
from metainfer.formats.checkpoint import BlockCheckpoint
from metainfer.formats.extents import Shard, split
from metainfer.formats.quant import RawTensor, Stored, dequantise
from metainfer.formats.random_source import RandomSource
from metainfer.formats.schemes import BLOCKS
from metainfer.formats.shards import take, take_raw
from metainfer.kernels.impl import Layout
from metainfer.models.arch import Arch, Cut, WeightSpec
from metainfer.models.common.spread import Part
from metainfer.ops.linear.packed import PackedWeight
from metainfer.planner.opening import OpenedModel

Progress = Callable[[int, int], None]


class TensorSource(Protocol):
    """Anything that yields tensors by canonical name."""

    def read(self, name: str) -> Stored: ...


@dataclass(frozen=True, slots=True)
class RankPart:
    """What a rank holds of a weight: part `part` of `parts`.

    `cut`: rows or columns of each of its tensors, or experts (whole tensors of it).
    """

    cut: Cut = Cut.WHOLE
    part: int = 0
    parts: int = 1


AHEAD = 1 << 28
"""Elements brought into the page cache beyond the weight being packed; the next one always is,
so that the disk works while the host packs."""

WHOLE = RankPart()
Sharding = Callable[[WeightSpec], RankPart]


def part_of(cut: tuple[Cut, int], place: Place) -> RankPart:
    """What the rank at `place` holds of a weight that is cut so: parts follow each other over the
    ranks of a domain, experts over those of a set."""
    kind, parts = cut
    if kind is Cut.WHOLE or parts == 1:
        return WHOLE
    return RankPart(kind, place.rank % parts, parts)


def shard_at(arch: Arch, place: Place | None) -> Sharding:
    """What of each weight the rank at `place` holds, as decodes have it."""
    if place is None:
        return lambda spec: WHOLE
    return lambda spec: part_of(arch.cut(spec, place.layout.decoding), place)


def shards_held(arch: Arch, place: Place | None) -> list[Sharding]:
    """Of a pair, whose chunks need all parts of a domain: as each of its ranks holds them, in rank
    order; else as the rank at `place` does."""
    if place is None or place.layout.prefill == 1:
        return [shard_at(arch, place)]
    return [shard_at(arch, replace(place, rank=rank)) for rank in range(place.layout.tensor)]


@dataclass(slots=True)
class LoadedWeights:
    """`packed` and `plain` by `WeightSpec.name`. `beside`: bytes of other ranks' parts that are
    held with them."""

    packed: dict[str, PackedWeight] = field(default_factory=dict)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    beside: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes held; a tied weight counts once."""
        once = {id(weight.data): weight.nbytes for weight in self.packed.values()}
        plain = sum(tensor.nbytes for tensor in self.plain.values())
        return sum(once.values()) + plain + self.beside


def load_weights(
    arch: Arch,
    source: TensorSource,
    layouts: Mapping[str, Layout],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    shard: Sharding = lambda spec: WHOLE,
    only: Callable[[WeightSpec], bool] = lambda spec: True,
) -> LoadedWeights:
    """Read, check and pack every weight of `arch`; `layouts` by `WeightSpec.role`.

    `shard`: what of each weight this rank holds; no more is read of a mapped file. `only`: which
    weights, of all.

    Raises:
        ModelError: a tensor is missing, has another shape than the config says, or scales that no
            trained weight has.
        RefusedError: the ranks do not divide a matrix at whole blocks.
    """
    loaded = LoadedWeights()
    held: dict[tuple[object, ...], PackedWeight] = {}
    specs = tuple(spec for spec in arch.packed_weights() if only(spec))
    plain = tuple(spec for spec in arch.plain_weights() if only(spec))
    total = sum(spec.elements for spec in (*specs, *plain))
    done = 0
    for spec in _in_order(source, specs, shard):
        layout = layouts[spec.role]
        key = (layout.id, shard(spec), *layout.storage(spec.tensors, spec.site))
        if key in held:
            loaded.packed[spec.name] = held[key].at_site(spec.site)
        else:
            pack: Any = layout.resolve()
            raws, bias = _read_part(source, spec, shard(spec)), _bias(source, spec, shard(spec))
            weight = pack(raws, bias, dtype=dtype, device=device, site=spec.site)
            held[key] = loaded.packed[spec.name] = weight
        done += spec.elements
        if progress is not None:
            progress(done, total)
    for spec in _in_order(source, plain, shard):
        (raw,) = _read_part(source, spec, shard(spec))
        loaded.plain[spec.name] = _plain(raw, spec, dtype).to(device)
        done += spec.elements
    if progress is not None and plain:
        progress(done, total)
    return loaded


def load_parts(
    arch: Arch,
    source: TensorSource,
    layouts: Mapping[str, Layout],
    own: LoadedWeights,
    place: Place | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Part]:
    """The model as each rank of a domain holds it, in rank order, where chunks need all of them;
    else as this one does. `own` is this rank's, and grows by the bytes of the others."""
    if place is None or place.layout.prefill == 1:
        return [(own.packed, own.plain)]
    layout, decoding = place.layout, place.layout.decoding

    def beside(spec: WeightSpec) -> bool:
        return arch.cut(spec, layout)[0] is Cut.WHOLE is not arch.cut(spec, decoding)[0]

    parts: list[Part] = []
    for rank, other in enumerate(shards_held(arch, place)):
        packed, plain = dict(own.packed), dict(own.plain)
        if rank != place.rank % layout.tensor:
            found = load_weights(
                arch, source, layouts, dtype=dtype, device=device, shard=other, only=beside
            )
            packed.update(found.packed)
            plain.update(found.plain)
            own.beside += found.nbytes
        parts.append((packed, plain))
    return parts


def _in_order(
    source: TensorSource, specs: Sequence[WeightSpec], shard: Sharding
) -> Iterator[WeightSpec]:
    """`specs`, while the files' bytes are brought in ahead and let go after each."""
    if not isinstance(source, BlockCheckpoint):
        yield from specs
        return
    asked, ahead = 0, 0
    try:
        for at, spec in enumerate(specs):
            while asked < len(specs) and (asked <= at + 1 or ahead < AHEAD + spec.elements):
                near = specs[asked]
                mine = shard(near)
                rows = (mine.part, mine.parts) if mine.cut == "rows" else (0, 1)
                source.expect((*_own(near, mine), *near.bias), *rows)
                ahead, asked = ahead + near.elements, asked + 1
            yield spec
            ahead -= spec.elements
            source.release(spec.tensors)
    finally:
        source.close()


def _own(spec: WeightSpec, mine: RankPart) -> tuple[str, ...]:
    """The tensors of a weight of which the rank holds anything."""
    if mine.cut != "experts":
        return spec.tensors
    share, rest = divmod(len(spec.tensors), mine.parts)
    if rest:
        raise InternalError(f"{len(spec.tensors)} tensors of {spec.name} over {mine.parts} ranks")
    return spec.tensors[mine.part * share : (mine.part + 1) * share]


def _read_part(source: TensorSource, spec: WeightSpec, mine: RankPart) -> list[Stored]:
    """The rank's tensors of a weight, or its rows or columns of each."""
    shapes = dict(zip(spec.tensors, spec.tensor_shapes(), strict=True))
    raws = []
    for name in _own(spec, mine):
        raw, shape = source.read(name), shapes[name]
        if tuple(raw.shape) != shape:
            raise ModelError(
                f"tensor {name} has shape {list(raw.shape)}, the config says {list(shape)}.",
                "The weights do not belong to this config; fetch the checkpoint again.",
                code="bad_shape",
            )
        raws.append(_cut(raw, name, mine, spec, spec.tensors.index(name)))
    return raws


def _cut(raw: Stored, name: str, mine: RankPart, spec: WeightSpec, tensor: int) -> Stored:
    """Rows or columns of a weight's `tensor`, between blocks that share a scale; the tensor itself
    where it is whole. What is lacking to the size of the largest part is zero."""
    if mine.cut not in ("rows", "columns") or mine.parts == 1:
        return raw
    dim = 0 if mine.cut == "rows" else 1
    shard_of = partial(shard_of_tensor, raw.shape[dim], mine, spec, tensor, name)
    if isinstance(raw, BlockTensor):
        return take(raw, dim, shard_of(raw.format.block[dim]))
    return take_raw(raw, dim, shard_of(BLOCKS.get(raw.scheme, (1, 1))[0] if dim else 1))


def shard_of_tensor(
    extent: int, mine: RankPart, spec: WeightSpec, tensor: int, name: str, block: int = 1
) -> Shard:
    """A rank's part of the rows or columns of a weight's `tensor`: in whole units, or where ranks
    are more, of one unit: its part in whole grains, or all of it where it is one grain. Cuts fall
    between blocks of `block`."""
    unit, grain, what = spec.unit_of(tensor), spec.grain_of(tensor), f"{mine.cut} of {name}"
    units, part, parts = extent // unit, mine.part, mine.parts
    first = 0
    if parts > units:
        number, part = divmod(part, parts // units)
        first, extent, parts = number * unit, unit, parts // units if grain < unit else 1
        unit = grain
    block = math.lcm(block, unit)
    found = split(extent, parts, block, pad=block == unit, what=what)[part % parts]
    return replace(found, start=first + found.start)


def _plain(raw: Stored, spec: WeightSpec, dtype: torch.dtype) -> torch.Tensor:
    """A small tensor in the spec's own dtype, else the model's."""
    scheme = raw.scheme if isinstance(raw, RawTensor) else ""
    dtype = getattr(torch, spec.kept_in(scheme, str(dtype).removeprefix("torch.")))
    if isinstance(raw, RawTensor) and not raw.data.is_floating_point() and raw.scheme not in BLOCKS:
        return raw.data.to(dtype, copy=True)  # ids: exact, and not a view of the file
    return dequantise(raw, dtype).clone()


def _bias(source: TensorSource, spec: WeightSpec, mine: RankPart) -> torch.Tensor | None:
    """Biases laid end to end in float32, or None. Where columns are cut, the first rank adds it."""
    if not spec.bias or (mine.cut == "columns" and mine.part):
        return None
    part = mine if mine.cut == "rows" else WHOLE
    raws = [_cut(source.read(n), n, part, spec, i) for i, n in enumerate(spec.bias)]
    return torch.cat([dequantise(raw, torch.float32) for raw in raws])


def tensor_source(model: OpenedModel, device: torch.device) -> TensorSource:
    """The checkpoint's tensors, or random ones drawn where they are needed."""
    if model.source.random is not None:
        return RandomSource(model.draws, model.seed, device)
    assert model.index is not None
    return BlockCheckpoint(model.index, model.blocks)
