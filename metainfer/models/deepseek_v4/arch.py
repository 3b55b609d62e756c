"""DeepSeek-V4-Flash without tensors: its shape, and the face that planner and loader see.

Every layer keeps the latents of a sliding window. A compressing layer adds one entry for each
`ratio` tokens: CSA (ratio 4, chosen by an indexer, with index keys of its own) or HCA (ratio 128,
all of them read). Formulas: the model's technical report and inference code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason, Verdict
from metainfer.kernels.impl import OpRequest
from metainfer.kv.book.spec import CacheSpec
from metainfer.models.arch import Cut, WeightSpec, unknown_options
from metainfer.models.deepseek_v4 import caches, cost, placement, requests, weights
from metainfer.ops.attn_sparse.tiles import PLACE_BYTES
from metainfer.ops.indexer.tiles import WORKSPACE, row_bytes
from metainfer.ops.workspaces import FILTER_BYTES

FAMILY = "deepseek_v4"


class LayerKind(StrEnum):
    """What a layer attends to beside its window."""

    WINDOW = "window"
    CSA = "csa"
    HCA = "hca"


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Context extension of the layers that compress. The amplitude stays 1: no mscale."""

    factor: float
    beta_fast: float
    beta_slow: float
    original: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekV4Arch:
    """Everything that shapes the model. Widths in elements.

    `kinds` per layer; `csa`, `hca`: tokens of one compressed entry. `clamp_shared`: the shared
    expert is clamped like the routed ones, as deployed engines do (the published code does not).
    `mtp`: the draft layer is loaded and run beside the model. `ranks`: how many share each matrix,
    `expert_ranks`: the experts; of one rank, heads, output groups and ffn are its own.
    `chunk_heads`: heads that it computes in chunks, where these are not as many (0: they are).
    `shards`: ranks over which entries and index keys are dealt.
    """

    layers: int
    vocab_size: int
    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    kinds: tuple[LayerKind, ...]
    csa: int
    hca: int
    theta: float
    compress_theta: float
    yarn: Yarn | None
    max_context: int
    index_heads: int
    index_dim: int
    index_topk: int
    streams: int
    sinkhorn_iters: int
    hyper_eps: float
    norm_eps: float
    ffn: int
    experts: int
    experts_per_token: int
    routed_scale: float
    hash_layers: int
    limit: float
    clamp_shared: bool = True
    mtp: bool = False
    draft_layers: int = 0
    dspark_block: int = 0
    eos_token_ids: tuple[int, ...] = ()
    ranks: int = 1
    expert_ranks: int = 1
    chunk_heads: int = 0
    shards: int = 1

    @property
    def family(self) -> str:
        return FAMILY

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def index_scale(self) -> float:
        return float((self.index_heads * self.index_dim) ** -0.5)

    def ratio(self, layer: int) -> int:
        """Tokens of one compressed entry of a layer, 0 where there is none."""
        return {LayerKind.WINDOW: 0, LayerKind.CSA: self.csa, LayerKind.HCA: self.hca}[
            self.kinds[layer]
        ]

    @property
    def expert_ffn(self) -> int:
        """Channels of a routed expert: of one rank, its part unless it holds whole experts."""
        return self.ffn if self.expert_ranks == 1 else self.ffn * self.ranks

    def count(self, *kinds: LayerKind) -> int:
        """How many layers are of these kinds."""
        return sum(kind in kinds for kind in self.kinds)

    def with_options(self, options: Mapping[str, str]) -> DeepSeekV4Arch:
        """`clamp_shared` on (default) or off: whether the shared expert is clamped."""
        unknown_options(self, options, ("clamp_shared",))
        value = options.get("clamp_shared", "on")
        if value not in ("on", "off"):
            raise UsageError(f"clamp_shared is {value!r}.", "Write clamp_shared=on or off.")
        return replace(self, clamp_shared=value == "on")

    def with_draft(self) -> DeepSeekV4Arch:
        """The same model with its draft layer, which keeps a window of its own."""
        return replace(self, mtp=True)

    @property
    def adapters(self) -> None:
        """None: see `with_adapters`."""
        return None

    def with_adapters(self, folders: Mapping[str, Path]) -> DeepSeekV4Arch:
        """Refused: no op adds a pair to routed experts or to the latent projections."""
        raise RefusedError(
            f"{FAMILY} models take no adapters: {', '.join(folders)}.",
            "Serve it without --adapter; dense models take them.",
            reasons=(
                Reason("adapters", "nothing adds a low-rank pair to experts chosen per token"),
                Reason("adapters", "nothing adds one to latent and grouped projections"),
            ),
            code="adapters_refused",
        )

    @property
    def page_unit(self) -> int:
        return caches.page_unit(self)

    def cache_specs(self, dtype: str, layouts: Mapping[str, str]) -> tuple[CacheSpec, ...]:
        return caches.cache_specs(self, dtype, layouts)

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
        return requests.op_requests(self, phase, rows, logit_rows, dtype, schemes, page_tokens)

    @property
    def routed_experts(self) -> int:
        return self.experts

    def cut(self, spec: WeightSpec, layout: LayoutPlan) -> tuple[Cut, int]:
        return placement.cut(spec, layout)

    def layout_objections(
        self, layout: LayoutPlan, blocks: Mapping[str, tuple[int, int]]
    ) -> Verdict:
        return placement.objections(self, layout, blocks)

    def on_rank(self, layout: LayoutPlan) -> DeepSeekV4Arch:
        return placement.on_rank(self, layout)

    def costs(self) -> cost.Costs:
        return cost.Costs(self)

    def table_bytes(self, positions: int) -> int:
        """Two float32 tables of cosines and sines: plain, and of the layers that compress."""
        return 2 * positions * self.rope_dim * 4

    def activation_bytes(self, rows: int, logit_rows: int, dtype_bytes: int) -> int:
        """Streams twice, the widest intermediates of attention and experts, and where each query's
        keys are; or, once that is over, streams, float32 logits and what sampling takes for them.

        The indexer's scores are bounded by its workspace, not by rows times entries (B-19).
        """
        streams = 2 * self.streams * self.hidden
        queries = (
            2 * max(self.heads, self.chunk_heads) * self.head_dim
            + self.index_heads * self.index_dim
        )
        routed = 3 * self.ffn * self.experts_per_token + self.hidden
        widest = (streams + 2 * self.hidden + max(queries, routed)) * dtype_bytes
        projected = 4 * (4 * self.head_dim + 4 * self.index_dim + self.index_heads)
        scored = rows * row_bytes(self.max_context // self.csa, self.index_topk)
        scores = min(WORKSPACE, scored) if "csa" in self.kinds else 0
        chosen = {"csa": self.index_topk, "hca": self.max_context // self.hca}
        places = self.window + max(chosen.get(kind, 0) for kind in self.kinds)
        layers = rows * (widest + projected + PLACE_BYTES * places) + scores
        drawn = logit_rows * self.vocab_size * (4 + FILTER_BYTES)
        return max(layers, rows * streams * dtype_bytes + drawn)
