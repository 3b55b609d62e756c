"""Which op first made NaN or infinity: a trace that checks what every op of the table returns.

The check costs a reduction per op and no wait: flags stay on the device until `first` reads all of
them at once. A site says which op; the layer is that of the weights or caches an op was given, or
of the latest op that was given any.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metainfer.core.step import Phase
from metainfer.kernels.table import Function, Trace


@dataclass(frozen=True, slots=True)
class Place:
    """One call of an op. `layer` is None before the first layer."""

    phase: Phase
    site: str
    impl: str
    layer: int | None

    def __str__(self) -> str:
        where = "before the first layer" if self.layer is None else f"layer {self.layer}"
        return f"{self.site} ({where}, {self.impl}, {self.phase.value})"


class FiniteTrace(Trace):
    """As `Trace`, and remembers for every call whether its results are finite."""

    def __init__(self) -> None:
        super().__init__()
        self._owners: Mapping[int, int] = {}
        self._layer: int | None = None
        self._flags: list[tuple[Place, Tensor]] = []

    def know(self, owners: Mapping[int, int]) -> None:
        """`owners`: layer by the id of its weights and caches (`owners_of`)."""
        self._owners = owners

    def start(self) -> None:
        """A pass through the model begins."""
        self._layer = None
        self._flags.clear()

    def first(self) -> Place | None:
        """The first call since `start` with a result that is not finite. Waits for the device."""
        if not self._flags:
            return None
        flags = torch.stack([flag for _, flag in self._flags]).tolist()
        return self._flags[flags.index(True)][0] if True in flags else None

    def wrap(self, function: Function, phase: Phase, site: str, impl: str) -> Function:
        counted = super().wrap(function, phase, site, impl)
        if site.partition(".")[0] == "sample":
            return counted

        def checked(*args: Any, **kwargs: Any) -> Any:
            results = counted(*args, **kwargs)
            for argument in args:
                self._layer = self._owners.get(id(argument), self._layer)
            bad = [~torch.isfinite(tensor).all() for tensor in _floats(results)]
            if bad:
                flag = bad[0] if len(bad) == 1 else torch.stack(bad).any()
                self._flags.append((Place(phase, site, impl, self._layer), flag))
            return results

        return checked


def _floats(results: Any) -> list[Tensor]:
    listed = results if isinstance(results, tuple | list) else (results,)
    return [
        one if one.dtype.itemsize > 1 else one.float()  # one-byte floats know no isfinite
        for one in listed
        if isinstance(one, Tensor) and one.is_floating_point()
    ]


def owners_of(layers: Sequence[object], caches: Sequence[Mapping[str, object]]) -> dict[int, int]:
    """Layer by object id, for what belongs to one layer alone."""
    found: dict[int, int] = {}
    seen: Counter[int] = Counter()
    for index, layer in enumerate(layers):
        mine = {id(part) for part in _parts(layer)}
        if index < len(caches):
            mine |= {id(part) for cache in caches[index].values() for part in _parts(cache)}
        seen.update(mine)
        found.update(dict.fromkeys(mine, index))
    return {key: layer for key, layer in found.items() if seen[key] == 1}


def _parts(value: object) -> Iterator[object]:
    """A dataclass, what its fields hold, and what is in their tuples."""
    if isinstance(value, tuple):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))
