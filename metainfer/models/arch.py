"""What a model is, without tensors: the face that the planner sees of every family.

Each family's `arch` module reads a checkpoint's config into an `Arch` and answers: which caches do
the layers keep, which ops do they use with which shapes, what do they weigh. Runs without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

from metainfer.core.errors import UsageError
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
from metainfer.core.verdict import Verdict
from metainfer.kernels.impl import OpRequest
from metainfer.kv.book.spec import CacheSpec

if TYPE_CHECKING:
    from pathlib import Path

    from metainfer.models.common.adapters import AdapterSet


EXACT = "exact"
"""`WeightSpec.dtype`: the model's type where the tensor is stored in it, otherwise float32."""

TOGETHER = 256
"""Rows of a rank up to which they go to experts of other domains as one message with their routes:
of more, taking them apart again costs more than a message does (seed: 6 copies of 8 KiB a row at
3 TB/s, against 7 us)."""

_SCHEMES = {"bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One site's weight as the model packs it: checkpoint tensors concatenated along N.

    `site`: the op site that reads it. `tensors`: canonical names in order, `rows` the N of each.
    `bias`: names likewise, empty for none. `shape`: (N, K) after concatenation, or (width,).
    `layer`: -1 outside the layers. `role`: whose layout packs it, ``weight`` or ``experts``.
    `dtype`: what a plain weight is kept in; empty for the model's own, `EXACT` for one that holds
    the stored numbers. `units`: of each tensor, the rows that no cut parts (of columns likewise,
    where these are cut); empty: any may be cut. `grains`: what no cut parts where ranks are more
    than units, which must be a multiple of them; a unit that is one grain is then copied.
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
    units: tuple[int, ...] = ()
    grains: tuple[int, ...] = ()

    def unit_of(self, tensor: int) -> int:
        return self.units[tensor] if self.units else 1

    def grain_of(self, tensor: int) -> int:
        return self.grains[tensor] if self.grains else self.unit_of(tensor)

    def kept_in(self, scheme: str, model: str) -> str:
        """The type of a plain weight stored as `scheme`, in a model of type `model`."""
        if self.dtype == EXACT:
            return model if _SCHEMES.get(model) == scheme else "float32"
        return self.dtype or model

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


class Cut(StrEnum):
    """How ranks share a matrix. `ROWS`: every tensor of it along N (gate and up each).
    `COLUMNS`: along K. `EXPERTS`: whole experts. `WHOLE`: every rank holds all of it."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    EXPERTS = "experts"


class Costs(Protocol):
    """What a family's arithmetic costs beside its matrices, for predictions.

    FLOPs come in two parts: those that tensor parallelism shares by heads, and those that every
    rank of a tensor group does.
    """

    @property
    def hidden(self) -> int:
        """Width of what collectives move, in elements."""
        ...

    @property
    def experts_per_token(self) -> int: ...

    @property
    def exact_logits(self) -> bool:
        """Whether logits are float32 whatever the model's type: what ranks send of a row."""
        ...

    @property
    def draft_width(self) -> int:
        """Elements of a row that a draft layer goes on from; 0 where none is loaded."""
        ...

    @property
    def layer_launches(self) -> float:
        """Kernels that a chunk launches for a layer (V4: counted on an H200; others: seeds)."""
        ...

    def distinct_experts(self, tokens: int) -> float:
        """Experts of one layer that `tokens` tokens touch, of all of them, under even routing."""
        ...

    def decode_attention_flops(self, context: int) -> tuple[float, float]:
        """Of one token that sees `context` tokens."""
        ...

    def prefill_attention_flops(self, tokens: int) -> tuple[float, float]:
        """Of a prompt of `tokens` tokens."""
        ...

    def cache_reads(self, specs: Sequence[CacheSpec], context: int) -> float:
        """Bytes of caches that one token reads over all layers."""
        ...


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

    def with_options(self, options: Mapping[str, str]) -> Arch:
        """The same model with switches of its family set.

        Raises:
            UsageError: no such switch or value.
        """
        ...

    def with_draft(self) -> Arch:
        """The same model with the draft layer of its checkpoint loaded beside it."""
        ...

    @property
    def adapters(self) -> AdapterSet | None:
        """The low-rank adapters that stand beside its matrices."""
        ...

    def with_adapters(self, folders: Mapping[str, Path]) -> Arch:
        """The same model with the adapters in `folders` (name -> folder) beside its matrices.

        Raises:
            RefusedError: the family takes none.
            ModelError: one cannot be read; `CheckpointError` with every fault if it does not fit.
        """
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

    @property
    def routed_experts(self) -> int:
        """Experts of a layer that ranks can share; 0 for a model without."""
        ...

    def cut(self, spec: WeightSpec, layout: LayoutPlan) -> tuple[Cut, int]:
        """How ranks share a weight under `layout`, and into how many parts."""
        ...

    def layout_objections(
        self, layout: LayoutPlan, blocks: Mapping[str, tuple[int, int]]
    ) -> Verdict:
        """Everything that forbids a layout; `blocks`: site -> rows and columns of one scale."""
        ...

    def on_rank(self, layout: LayoutPlan) -> Arch:
        """The model as one rank's caches and activations see it; its weights are `cut`."""
        ...

    def costs(self) -> Costs | None:
        """What predictions need, or None where the family has no cost model."""
        ...

    def table_bytes(self, positions: int) -> int:
        """Bytes of the position tables that the model keeps beside its weights."""
        ...

    def activation_bytes(self, rows: int, logit_rows: int, dtype_bytes: int) -> int:
        """Most transient bytes alive at once in a step of that many rows."""
        ...


A = TypeVar("A", bound=Arch)


def unknown_options(arch: A, options: Mapping[str, str], known: tuple[str, ...]) -> A:
    """`arch`, if its family knows every switch.

    Raises:
        UsageError: naming the ones that it does not.
    """
    strange = sorted(set(options) - set(known))
    if strange:
        raise UsageError(
            f"{arch.family} has no option {', '.join(strange)}.",
            f"Its options: {', '.join(known) or 'none'}.",
            code="unknown_option",
        )
    return arch
