"""From a checkpoint (or a seed) to packed weights on the device, with progress.

Shapes are asserted against the arch before anything is packed: a checkpoint that does not fit its
config is refused by tensor name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from metainfer.core.errors import ModelError
from metainfer.formats.checkpoint import Checkpoint
from metainfer.formats.quant import RawTensor, dequantise
from metainfer.kernels.impl import Layout
from metainfer.models.arch import Arch, WeightSpec
from metainfer.ops.linear.packed import PackedWeight
from metainfer.planner.opening import RANDOM_SCHEME, OpenedModel

Progress = Callable[[int, int], None]


class TensorSource(Protocol):
    """Anything that yields tensors by canonical name."""

    def read(self, name: str) -> RawTensor: ...


@dataclass(slots=True)
class LoadedWeights:
    """`packed` and `plain` by `WeightSpec.name`."""

    packed: dict[str, PackedWeight] = field(default_factory=dict)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes held; a tied weight counts once."""
        once = {id(weight.data): weight.nbytes for weight in self.packed.values()}
        return sum(once.values()) + sum(tensor.nbytes for tensor in self.plain.values())


class RandomSource:
    """Tensors drawn from a seed and their name: equal on every machine of one torch version and
    kind of device (a card draws other numbers than the host).

    Matrices have deviation 0.02 (as `transformers` initialises), vectors lie around 1.
    """

    def __init__(
        self, arch: Arch, seed: int, *, scheme: str = "BF16", device: torch.device | None = None
    ) -> None:
        self._seed = seed
        self._scheme = scheme
        self._device = device or torch.device("cpu")
        self._shapes: dict[str, tuple[int, ...]] = {}
        for spec in (*arch.packed_weights(), *arch.plain_weights()):
            shapes = spec.tensor_shapes()
            self._shapes.update(zip(spec.tensors, shapes, strict=True))
            self._shapes.update({n: s[:1] for n, s in zip(spec.bias, shapes, strict=False)})

    def read(self, name: str) -> RawTensor:
        shape = self._shapes[name]
        generator = torch.Generator(self._device)
        # One 32-bit number: the CPU generator ignores the upper half of a longer seed.
        generator.manual_seed(zlib.crc32(f"{self._seed}:{name}".encode()))
        data = torch.randn(shape, generator=generator, device=self._device) * 0.02
        if len(shape) == 1 and name.endswith(".weight"):
            data += 1.0
        dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[self._scheme]
        return RawTensor(self._scheme, shape, data.to(dtype))


def load_weights(
    arch: Arch,
    source: TensorSource,
    weight_layout: Layout,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> LoadedWeights:
    """Read, check and pack every weight of `arch`.

    Raises:
        ModelError: a tensor is missing or has another shape than the config says.
    """
    loaded = LoadedWeights()
    pack: Any = weight_layout.resolve()
    held: dict[tuple[object, ...], PackedWeight] = {}
    specs = arch.packed_weights()
    total = sum(spec.elements for spec in specs)
    done = 0
    for spec in specs:
        key = weight_layout.storage(spec.tensors, spec.site)
        if key in held:
            loaded.packed[spec.name] = held[key].at_site(spec.site)
        else:
            raws = _read_checked(source, spec)
            weight = pack(raws, _bias(source, spec), dtype=dtype, device=device, site=spec.site)
            held[key] = loaded.packed[spec.name] = weight
        done += spec.elements
        if progress is not None:
            progress(done, total)
    for spec in arch.plain_weights():
        (raw,) = _read_checked(source, spec)
        loaded.plain[spec.name] = dequantise(raw, dtype).to(device)
    return loaded


def _read_checked(source: TensorSource, spec: WeightSpec) -> list[RawTensor]:
    raws = []
    for name, shape in zip(spec.tensors, spec.tensor_shapes(), strict=True):
        raw = source.read(name)
        if tuple(raw.shape) != shape:
            raise ModelError(
                f"tensor {name} has shape {list(raw.shape)}, the config says {list(shape)}.",
                "The weights do not belong to this config; fetch the checkpoint again.",
                code="bad_shape",
            )
        raws.append(raw)
    return raws


def _bias(source: TensorSource, spec: WeightSpec) -> torch.Tensor | None:
    """Biases laid end to end in float32, or None."""
    if not spec.bias:
        return None
    return torch.cat([dequantise(source.read(name), torch.float32) for name in spec.bias])


def tensor_source(model: OpenedModel, device: torch.device) -> TensorSource:
    """The checkpoint's tensors, or random ones drawn where they are needed."""
    if model.source.random is not None:
        return RandomSource(model.arch, model.seed, scheme=RANDOM_SCHEME, device=device)
    assert model.index is not None
    return Checkpoint(model.index)
