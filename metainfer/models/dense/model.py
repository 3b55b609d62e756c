"""The dense decoder, as its papers write it.

Shapes: T tokens, Hq/Hkv query/KV heads, D head width, H hidden, F mlp width, V vocabulary.
Every computation goes through `ops`, the table of implementations that the plan chose for this
phase; nothing here knows a device, a dtype or a packing. Where ranks share the model, Hq, Hkv and F
are those of one rank, and `o` and `down` give parts of a sum. Where they share a chunk's rows, a
rank has the parts of all of them, and adds the sum up by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from metainfer.comm.exact import canonical_sum
from metainfer.comm.peers import SINGLE, Ranks
from metainfer.comm.side import Done, Pending
from metainfer.core.step import ALL_LAYERS
from metainfer.kernels.table import PhaseOps
from metainfer.kv.store.pools import PagedLayerCache
from metainfer.models.common.dealt import Dealt
from metainfer.models.common.ends import Ends
from metainfer.models.common.inputs import SegmentInputs
from metainfer.models.common.lanes import Lane, alone
from metainfer.models.common.lowrank import LowRankPairs, adapt
from metainfer.models.common.spread import Part
from metainfer.models.common.summed import start_summed
from metainfer.models.dense.arch import DenseArch
from metainfer.ops.linear.packed import PackedWeight


@dataclass(slots=True)
class DenseLayer:
    """One decoder layer's weights. `q_norm`/`k_norm` [D] where the family has them. `pairs`: the
    adapters beside each of its matrices that any adapter has (``qkv`` ...)."""

    attn_norm: torch.Tensor  # [H]
    qkv: PackedWeight  # [(Hq + 2 Hkv) D, H]
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: PackedWeight  # [H, Hq D]
    mlp_norm: torch.Tensor  # [H]
    gate_up: PackedWeight  # [2 F, H]
    down: PackedWeight  # [H, F]
    window: int
    pairs: dict[str, LowRankPairs] = field(default_factory=dict)


Product = Callable[[torch.Tensor, DenseLayer, SegmentInputs, PhaseOps], torch.Tensor]
"""Of rows [T, ...]: one rank's part of a sum [T, H]."""


class DenseModel:
    """Holds weights; `forward` runs one segment, `logits` the head.

    `parts`: see `for_prompts`.
    """

    def __init__(
        self,
        arch: DenseArch,
        packed: Mapping[str, PackedWeight],
        plain: Mapping[str, torch.Tensor],
        cos_sin: torch.Tensor,
        ranks: Ranks = SINGLE,
        parts: Sequence[Part] = (),
    ) -> None:
        self.arch = arch
        self.cos_sin = cos_sin  # [M, R] float32
        self.peers, self.turns, self.dealt = ranks.tensor, ranks.turns, Dealt(ranks.shards)
        words = ranks.prompts if len(parts) > 1 else ranks.tensor
        ends = (packed["embed"], packed["lm_head"], arch.vocab_size)
        self.ends = Ends(*ends, words, apart=bool(parts))
        self.norm = plain["norm"]
        self.parts = [_layers(arch, *part) for part in parts or ((packed, plain),)]

    @property
    def layers(self) -> list[DenseLayer]:
        """The layers, in the first part of the matrices."""
        return self.parts[0]

    def for_prompts(self, parts: Sequence[Part], ranks: Ranks) -> DenseModel:
        """The same model for chunks whose rows ranks share: over the same tables, and weights that
        include `parts`, one of each rank that decodes share, in rank order."""
        packed = {"embed": self.ends.embed, "lm_head": self.ends.head}
        return DenseModel(
            self.arch, packed, {"norm": self.norm}, self.cos_sin, ranks.of_prompts(), parts
        )

    def use_adapters(self, parts: Sequence[Mapping[str, LowRankPairs]]) -> None:
        """From now on rows may have adapters; pairs by `WeightSpec.name`, for each part of the
        matrices."""
        for layers, pairs in zip(self.parts, parts, strict=True):
            for weight, each in pairs.items():
                _, layer, matrix = weight.split(".")
                layers[int(layer)].pairs[matrix] = each

    @property
    def table_bytes(self) -> int:
        """Bytes of the position tables held beside the weights."""
        return self.cos_sin.nbytes

    def forward(
        self,
        inputs: SegmentInputs,
        caches: Sequence[Mapping[str, Any]],
        ops: PhaseOps,
        stop_layer: int = ALL_LAYERS,
    ) -> torch.Tensor:
        """Run the layers below `stop_layer`; returns the normed hidden states [T, H].

        With `stop_layer` the norm applied last is that of the layer which was not run.
        """
        return alone(self.lane(inputs, caches, ops, stop_layer))

    def lane(
        self,
        inputs: SegmentInputs,
        caches: Sequence[Mapping[str, Any]],
        ops: PhaseOps,
        stop_layer: int = ALL_LAYERS,
    ) -> Lane[torch.Tensor]:
        """`forward` as a lane."""
        eps = self.arch.norm_eps
        last = len(self.layers) if stop_layer == ALL_LAYERS else stop_layer
        residual = self.ends.words(inputs.ids, ops)  # [T, H]
        x: torch.Tensor = ops.rmsnorm(residual, self._norm_of(0), eps)
        for index in range(last):
            layers, cache = [part[index] for part in self.parts], caches[index]["kv"]
            found = [
                self._attention(x, at, layers, cache, inputs, ops) for at in range(len(layers))
            ]
            y = self._start_sum(_out, found, layers, inputs, ops)
            yield
            x, residual = ops.add_rmsnorm(y.wait(), residual, layers[0].mlp_norm, eps)
            y = self._start_sum(_mlp, [x] * len(layers), layers, inputs, ops)
            yield
            x, residual = ops.add_rmsnorm(y.wait(), residual, self._norm_of(index + 1), eps)
        return x

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head reads of `forward`'s result, for all rows [T, H]."""
        return hidden

    def logits(self, hidden: torch.Tensor, inputs: SegmentInputs, ops: PhaseOps) -> torch.Tensor:
        """Logits [R, V] of the rows that need them, from `forward`'s result [T, H]."""
        rows = hidden if inputs.logit_rows is None else hidden[inputs.logit_rows]
        return self.head(rows, ops)

    def head(self, rows: torch.Tensor, ops: PhaseOps) -> torch.Tensor:
        """Logits [R, V] of normed rows [R, H]."""
        return self.ends.logits(rows, ops.linear)

    def _start_sum(
        self,
        product: Product,
        rows: Sequence[torch.Tensor],
        layers: Sequence[DenseLayer],
        inputs: SegmentInputs,
        ops: PhaseOps,
    ) -> Pending[torch.Tensor]:
        """The sum of what `product` makes of `rows` [T, ...] with matrices that ranks hold parts
        of; those that are here are added as ranks would add them."""
        if len(layers) == 1:
            return start_summed(
                lambda x: product(x, layers[0], inputs, ops), rows, self.peers, self.turns
            )
        found = [product(x, layer, inputs, ops) for x, layer in zip(rows, layers, strict=True)]
        return Done(canonical_sum(found))

    def _attention(
        self,
        x: torch.Tensor,
        part: int,
        layers: Sequence[DenseLayer],
        cache: PagedLayerCache,
        inputs: SegmentInputs,
        ops: PhaseOps,
    ) -> torch.Tensor:
        arch, tokens, layer = self.arch, x.shape[0], layers[part]
        qkv: Any = ops.linear(x, layer.qkv)  # [T, (Hq + 2 Hkv) D]
        adapt(qkv, x, layer.pairs.get("qkv"), inputs, ops)
        q, k, v = qkv.split(arch.qkv_rows, dim=-1)
        # Slices of one tensor: the ops take any stride over tokens.
        q = q.view(tokens, arch.heads, arch.head_dim)
        k = k.view(tokens, arch.kv_heads, arch.head_dim)
        v = v.view(tokens, arch.kv_heads, arch.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = _per_head_norm(q, layer.q_norm, arch.norm_eps, ops)
            k = _per_head_norm(k, layer.k_norm, arch.norm_eps, ops)
        q, k = ops.rope(q, k, inputs.positions, self.cos_sin, arch.rope.interleaved)
        group, spread = inputs.groups[cache.group], inputs.spread
        held = cache if spread is None else spread.borrow(cache, part)
        ops.kv_write(k, v, held.k, held.v, group.slots)
        if spread is not None:
            spread.share(held, cache, part)
        if held.parts > 1:
            out = self._over_parts(q, held, inputs, ops)
        else:
            out = ops.attn_paged(
                q,
                held.k,
                held.v,
                group.pages,
                inputs.query_start,
                inputs.context_lens,
                scale=arch.scale,
                window=layer.window,
            )  # [T, Hq, D]
        return out.view(tokens, arch.heads * arch.head_dim)

    def _over_parts(
        self, q: torch.Tensor, cache: PagedLayerCache, inputs: SegmentInputs, ops: PhaseOps
    ) -> torch.Tensor:
        """Attention [T, Hq, D] over keys and values that are dealt over ranks: each attends with
        the queries of all of them to the keys that it holds."""
        dealt = self.dealt
        mixed, log = ops.attn_paged_part(
            dealt.heads(q),
            cache.k,
            cache.v,
            inputs.groups[cache.group].pages,
            dealt.held(inputs.positions + 1),
            inputs.query_start,
            scale=self.arch.scale,
        )  # [T, N Hq, D], [T, N Hq]
        logs = dealt.logs(log)
        shares = ops.attn_weigh(q, mixed, logs, None, None, inputs.positions, rank=dealt.rank)
        return dealt.merged(shares)

    def _norm_of(self, index: int) -> torch.Tensor:
        return self.layers[index].attn_norm if index < len(self.layers) else self.norm


def _layers(
    arch: DenseArch, packed: Mapping[str, PackedWeight], plain: Mapping[str, torch.Tensor]
) -> list[DenseLayer]:
    return [
        DenseLayer(
            attn_norm=plain[f"layers.{i}.attn_norm"],
            qkv=packed[f"layers.{i}.qkv"],
            q_norm=plain.get(f"layers.{i}.q_norm"),
            k_norm=plain.get(f"layers.{i}.k_norm"),
            o=packed[f"layers.{i}.o"],
            mlp_norm=plain[f"layers.{i}.mlp_norm"],
            gate_up=packed[f"layers.{i}.gate_up"],
            down=packed[f"layers.{i}.down"],
            window=arch.windows[i],
        )
        for i in range(arch.layers)
    ]


def _out(
    heads: torch.Tensor, layer: DenseLayer, inputs: SegmentInputs, ops: PhaseOps
) -> torch.Tensor:
    """The output projection of attended heads [T, Hq D]; one rank's part of the sum."""
    return adapt(ops.linear(heads, layer.o), heads, layer.pairs.get("o"), inputs, ops)


def _mlp(x: torch.Tensor, layer: DenseLayer, inputs: SegmentInputs, ops: PhaseOps) -> torch.Tensor:
    """The gated feed-forward of normed rows x [T, H]; one rank's part of the sum."""
    y = ops.linear(x, layer.gate_up)  # [T, 2 F]
    middle = ops.swiglu(adapt(y, x, layer.pairs.get("gate_up"), inputs, ops))  # [T, F]
    return adapt(ops.linear(middle, layer.down), middle, layer.pairs.get("down"), inputs, ops)


def _per_head_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, ops: PhaseOps
) -> torch.Tensor:
    """RMSNorm over each head's D entries (Qwen3); x [T, heads, D]."""
    flat: torch.Tensor = ops.rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps)
    return flat.view(x.shape)
