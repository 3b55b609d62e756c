"""Which adapters stand beside which matrices, and what that takes. No torch.

Storage is the same for all: per packed matrix the pairs of every adapter, padded with zeros to the
largest rank and to every part that any of them has (ADR 0018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from metainfer.core.step import Phase
from metainfer.formats.adapters import Adapter, read_adapter
from metainfer.kernels.impl import OpRequest
from metainfer.models.arch import Cut, WeightSpec

LINEAR = "linear."
NO_PAIR = {
    "embed": "adapters of token embeddings are not served",
    "linear.lm_head": "adapters of the output head are not served",
}


@dataclass(frozen=True, slots=True)
class AdapterSite:
    """The pairs beside one packed matrix (`weight`, a `WeightSpec.name`), at the op site `site`.

    `modules`: names of its parts that some adapter has, each with its (start, width) in `spans`.
    `inner`: the matrix's K. `rank`: the largest.

    Of one rank of several, spans and `inner` are those of its part: B is cut like rows (`ROWS`), A
    like columns, and what the matrix's cut leaves whole is on every rank. `beside`: parts of other
    ranks, its own among them, that it holds for chunks whose rows ranks share.
    """

    weight: str
    site: str
    modules: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    inner: int
    rank: int
    cut: Cut = Cut.WHOLE
    beside: int = 1

    @property
    def width(self) -> int:
        return sum(width for _, width in self.spans)

    def elements(self, ranks: Mapping[str, int]) -> int:
        """Of A and B of one adapter, whose modules have these ranks."""
        inner = self.inner * (self.beside if self.cut is Cut.COLUMNS else 1)
        parts = self.beside if self.cut is Cut.ROWS else 1
        modules = zip(self.modules, self.spans, strict=True)
        return sum(ranks.get(name, 0) * (inner + parts * width) for name, (_, width) in modules)


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """The adapters of a model in the order of their places, and the sites that they need."""

    adapters: tuple[Adapter, ...]
    sites: tuple[AdapterSite, ...]

    @property
    def count(self) -> int:
        return len(self.adapters)

    @property
    def rank(self) -> int:
        return max(adapter.rank for adapter in self.adapters)

    @property
    def whole(self) -> bool:
        """Whether they stand beside whole matrices."""
        return all(site.cut is Cut.WHOLE for site in self.sites)

    def held_bytes(self, width: int) -> int:
        """Bytes of all pairs and scales; `width` of one element of the model's type."""
        count, held = self.count, 0
        for site in self.sites:
            held += count * site.elements(dict.fromkeys(site.modules, site.rank)) * width
            held += count * len(site.modules) * scale_bytes(width)
        return held

    def needed_bytes(self, adapter: Adapter, width: int) -> int:
        """Of these, what the pairs of one adapter need."""
        ranks = {module: pair.rank for module, pair in adapter.modules.items()}
        return sum(site.elements(ranks) for site in self.sites) * width

    def on_rank(
        self, specs: Sequence[WeightSpec], cut: Callable[[WeightSpec], Cut], beside: int
    ) -> AdapterSet:
        """The same beside one rank's matrices `specs`, which are `cut` so; see `AdapterSite`."""
        found = []
        for spec in specs:
            site = None if spec.site in NO_PAIR else _site(spec, self.adapters)
            if site is not None:
                found.append(replace(site, cut=cut(spec), beside=beside))
        return replace(self, sites=tuple(found))

    def transient_bytes(self, rows: int, width: int) -> int:
        """Low-rank rows of all adapters at once: products, scaled, selected, in the type again."""
        low = max(site.rank * len(site.modules) for site in self.sites) * self.count
        return rows * low * (3 * scale_bytes(width) + 2 * width)

    def requests(
        self, phase: Phase, rows: int, sequences: int, dtype: str
    ) -> tuple[OpRequest, ...]:
        """One request per op site. `sequences`: of a typical step."""
        by_site: dict[str, list[AdapterSite]] = {}
        for each in self.sites:
            by_site.setdefault(each.site, []).append(each)
        return tuple(
            OpRequest(
                "lora",
                site,
                phase,
                dtype,
                {
                    "rows": rows,
                    "n": max(each.width for each in group),
                    "k": group[0].inner,
                    "parts": max(len(each.modules) for each in group),
                    "adapters": self.count,
                    "rank": max(each.rank for each in group),
                    "seqs": sequences,
                },
                count=len(group),
            )
            for site, group in by_site.items()
        )


def scale_bytes(width: int) -> int:
    """Bytes of a scale, or of a sum: float64 in float64, else float32."""
    return max(width, 4)


def read_adapters(specs: Sequence[WeightSpec], folders: Mapping[str, Path]) -> AdapterSet:
    """The adapters in `folders` (name -> folder) beside the matrices `specs`, in the order of
    their names: a place is the same in every process.

    Raises:
        ModelError, CheckpointError: as `formats.adapters.read_adapter`.
    """
    targets: dict[str, tuple[int, int]] = {}
    kept = {"lm_head": NO_PAIR["linear.lm_head"]}
    for spec in specs:
        for tensor, shape in zip(spec.tensors, spec.tensor_shapes(), strict=True):
            module = tensor.removesuffix(".weight")
            if spec.site in NO_PAIR:
                kept.setdefault(module, NO_PAIR[spec.site])
            else:
                targets[module] = (shape[0], shape[1])
    found = tuple(read_adapter(name, path, targets, kept) for name, path in sorted(folders.items()))
    sites = (_site(spec, found) for spec in specs if spec.site not in NO_PAIR)
    return AdapterSet(found, tuple(site for site in sites if site is not None))


def _site(spec: WeightSpec, adapters: Sequence[Adapter]) -> AdapterSite | None:
    """What stands beside one matrix, or None where no adapter has anything."""
    modules, spans, rank, start = [], [], 0, 0
    for tensor, shape in zip(spec.tensors, spec.tensor_shapes(), strict=True):
        module = tensor.removesuffix(".weight")
        ranks = [each.modules[module].rank for each in adapters if module in each.modules]
        if ranks:
            modules.append(module)
            spans.append((start, shape[0]))
            rank = max(rank, *ranks)
        start += shape[0]
    if not modules:
        return None
    site = "lora." + spec.site.removeprefix(LINEAR)
    return AdapterSite(spec.name, site, tuple(modules), tuple(spans), spec.shape[1], rank)
