"""DeepSeek-V3.2 and GLM-5.x without tensors: their shape, and the face that the planner sees.

Every layer caches one latent a token (MLA). A layer with an indexer of its own scores every token
and keeps `index_topk` of them; a layer without one takes those of the nearest such layer before it,
and attention reads only these. Formulas: the publishers' configurations and inference code.

The family is planned, priced and not run: `models.registry` says what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason, Verdict
from metainfer.kernels.impl import OpRequest
from metainfer.kv.book.spec import CacheSpec
from metainfer.models.arch import Cut, WeightSpec, unknown_options
from metainfer.models.dsa import caches, cost, placement, requests, weights
from metainfer.ops.indexer.tiles import WORKSPACE, row_bytes
from metainfer.ops.rope.spec import RopeSpec
from metainfer.ops.workspaces import FILTER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DsaArch:
    """Everything that shapes the model. Widths in elements.

    `nope`, `rope_dim`, `v_dim`: of a head; `full`: per layer, whether it has an indexer of its own.
    `dense_layers` leading layers have a plain FFN of `dense_ffn` channels. `cache`: layout of the
    latents. `mtp`: the draft layer is held beside the model. `ranks`: how many share each matrix,
    `expert_ranks`: the experts; of one rank, heads and channels are its own.
    """

    family: str
    layers: int
    vocab_size: int
    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope_dim: int
    v_dim: int
    rope: RopeSpec = field(hash=False)
    index_heads: int
    index_dim: int
    index_topk: int
    index_interleaved: bool
    full: tuple[bool, ...]
    max_context: int
    norm_eps: float
    dense_layers: int
    dense_ffn: int
    ffn: int
    experts: int
    experts_per_token: int
    shared_experts: int
    groups: int
    groups_per_token: int
    routed_scale: float
    draft_layers: int = 0
    eos_token_ids: tuple[int, ...] = ()
    cache: str = caches.PLAIN
    mtp: bool = False
    ranks: int = 1
    expert_ranks: int = 1

    @property
    def latent(self) -> int:
        """Width of a cached latent: the compressed part and the rotated key."""
        return self.kv_rank + self.rope_dim

    @property
    def expert_ffn(self) -> int:
        """Channels of a routed expert: of one rank, its part unless it holds whole experts."""
        return self.ffn if self.expert_ranks == 1 else self.ffn * self.ranks

    def with_options(self, options: Mapping[str, str]) -> DsaArch:
        """`cache`: what a latent is stored as."""
        unknown_options(self, options, ("cache",))
        name = options.get("cache", "bf16")
        if name not in caches.OPTIONS:
            raise UsageError(
                f"cache is {name!r}.",
                f"Write cache={' or '.join(caches.OPTIONS)}.",
                code="bad_usage",
            )
        return replace(self, cache=caches.OPTIONS[name])

    def with_draft(self) -> DsaArch:
        """The same model with its draft layer, which has a cache and an indexer of its own."""
        return replace(self, mtp=True)

    @property
    def adapters(self) -> None:
        """None: see `with_adapters`."""
        return None

    def with_adapters(self, folders: Mapping[str, Path]) -> DsaArch:
        """Refused: the family is not run."""
        raise RefusedError(
            f"{self.family} models take no adapters: {', '.join(folders)}.",
            "Plan it without --adapter; dense models take them.",
            reasons=(Reason("adapters", "the family is planned and not run"),),
            code="adapters_refused",
        )

    @property
    def page_unit(self) -> int:
        return 1

    def cache_specs(self, dtype: str, layouts: Mapping[str, str]) -> tuple[CacheSpec, ...]:
        """No kernel reads these caches yet, so no bundle names their layouts: `cache` does."""
        return caches.cache_specs(self, dtype)

    def packed_weights(self) -> tuple[WeightSpec, ...]:
        return weights.packed_weights(self)

    def plain_weights(self) -> tuple[WeightSpec, ...]:
        return weights.plain_weights(self)

    def op_requests(
        self,
        phase: Phase,
        rows: int,
        logit_rows: int,
        dtype: str,
        schemes: Mapping[str, tuple[str, ...]],
        page_tokens: int,
    ) -> tuple[OpRequest, ...]:
        return requests.op_requests(self, phase, rows, logit_rows, dtype, schemes)

    @property
    def routed_experts(self) -> int:
        return self.experts

    def cut(self, spec: WeightSpec, layout: LayoutPlan) -> tuple[Cut, int]:
        return placement.cut(spec, layout)

    def layout_objections(
        self, layout: LayoutPlan, blocks: Mapping[str, tuple[int, int]]
    ) -> Verdict:
        return placement.objections(self, layout, blocks)

    def on_rank(self, layout: LayoutPlan) -> DsaArch:
        return placement.on_rank(self, layout)

    def costs(self) -> cost.Costs:
        return cost.Costs(self)

    def table_bytes(self, positions: int) -> int:
        """One float32 table of cosines and sines."""
        return positions * self.rope_dim * 4

    def activation_bytes(self, rows: int, logit_rows: int, dtype_bytes: int) -> int:
        """Residual and normed input, the widest intermediates of attention (absorbed queries and
        what they gather) and experts, chosen positions as int32, and the scores of as many rows as
        their workspace holds; or, once that is over, the stream, float32 logits and what sampling
        takes for them."""
        absorbed = self.heads * (self.latent + self.kv_rank) + self.index_heads * self.index_dim
        routed = 3 * self.expert_ffn * self.experts_per_token + self.hidden
        widest = 2 * self.hidden + max(absorbed, routed, 3 * self.dense_ffn)
        held = rows * (widest * dtype_bytes + 4 * self.index_topk)
        scores = min(rows * row_bytes(self.max_context, self.index_topk), WORKSPACE)
        drawn = logit_rows * self.vocab_size * (4 + FILTER_BYTES)
        return max(held + scores, 2 * rows * self.hidden * dtype_bytes + drawn)
