"""What a model is, without tensors: the face that the planner sees of every family.

Each family's `arch` module reads a checkpoint's config into an `Arch` and answers: which caches do
the layers keep, which ops do they use with which shapes, what do they weigh. Runs without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from metainfer.core.step import Phase
from metainfer.kernels.impl import OpRequest
from metainfer.kv.book.spec import CacheSpec


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One site's weight as the model packs it: checkpoint tensors concatenated along N.

    `site`: the op site that reads it. `tensors`: canonical names in order, `rows` the N of each.
    `bias`: names likewise, empty for none. `shape`: (N, K) after concatenation, or (width,).
    `layer`: -1 outside the layers. `role`: whose layout packs it, ``weight`` or ``experts``.
    `dtype`: what a plain weight is kept in; empty for the model's own.
    """

    name: str
    site: str
    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    bias: tuple[str, ...] = ()
    layer: int = -1
    rows: tuple[int, ...] = ()
    role: str = "weight"
    dtype: str = ""

    def tensor_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each of `tensors`."""
        rows = self.rows or (self.shape[0],)
        return tuple((count, *self.shape[1:]) for count in rows)

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


class Arch(Protocol):
    """The planner's and the loader's view of a model."""

    @property
    def family(self) -> str: ...

    @property
    def layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def with_draft(self) -> Arch:
        """The same model with the draft layer of its checkpoint loaded beside it."""
        ...

    @property
    def page_unit(self) -> int:
        """Tokens that a cache page must hold a multiple of."""
        ...

    def cache_specs(self, dtype: str, layouts: Mapping[str, str]) -> tuple[CacheSpec, ...]:
        """One description per cache, layer by layer; `layouts` gives each role its layout id."""
        ...

    def packed_weights(self) -> tuple[WeightSpec, ...]:
        """Matrices that go through a weight layout."""
        ...

    def plain_weights(self) -> tuple[WeightSpec, ...]:
        """Small tensors kept as they are (norms), in the activation type or their own."""
        ...

    def op_requests(
        self,
        phase: Phase,
        rows: int,
        logit_rows: int,
        dtype: str,
        schemes: Mapping[str, tuple[str, ...]],
        page_tokens: int,
    ) -> tuple[OpRequest, ...]:
        """Every op use in one phase. `rows`: tokens of a typical step, `logit_rows` of them need
        logits; `schemes`: site -> storage schemes; `page_tokens`: tokens of a cache page."""
        ...

    def table_bytes(self, positions: int) -> int:
        """Bytes of the position tables that the model keeps beside its weights."""
        ...

    def activation_bytes(self, rows: int, logit_rows: int, dtype_bytes: int) -> int:
        """Most transient bytes alive at once in a step of that many rows."""
        ...
