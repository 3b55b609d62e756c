"""DeepSeek-V4-Flash, as its technical report writes it.

Shapes: T tokens, N residual streams, D hidden, H query heads, d head width (keys and values are one
latent), R rotated channels, G output groups, E experts, F expert width, V vocabulary.
Every computation goes through `ops`, the table of implementations that the plan chose for this
phase; nothing here knows a device, a dtype, a packing or a cache format. Where ranks share the
model, H, G and F are those of one rank, experts may lie whole on ranks, and `wo_b`, the experts and
the shared expert give parts of sums; latents, entries and the indexer are on every rank. Where they
share a chunk's rows, a rank has all heads, in parts, and adds these sums up by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metainfer.comm.exact import canonical_sum
from metainfer.comm.peers import SINGLE, Ranks
from metainfer.core.step import ALL_LAYERS
from metainfer.kernels.table import PhaseOps
from metainfer.models.common.ends import Ends
from metainfer.models.common.inputs import SegmentInputs
from metainfer.models.common.spread import Part
from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch
from metainfer.models.deepseek_v4.layer import Layer, read_layer
from metainfer.ops.linear.packed import PackedWeight

Caches = Mapping[str, Any]


@dataclass(slots=True)
class Hidden:
    """What the layers leave: `normed` [T, D] for the head, `streams` [T, N, D] for a draft."""

    normed: Tensor
    streams: Tensor


class DeepSeekV4Model:
    """Holds weights; `forward` runs one segment, `logits` the head. `parts`: see `for_prompts`."""

    def __init__(
        self,
        arch: DeepSeekV4Arch,
        packed: Mapping[str, PackedWeight],
        plain: Mapping[str, Tensor],
        cos_sin: Tensor,
        compress_cos_sin: Tensor,
        ranks: Ranks = SINGLE,
        parts: Sequence[Part] = (),
    ) -> None:
        self.arch, self.ranks = arch, ranks
        words = ranks.prompts if len(parts) > 1 else ranks.tensor
        ends = (packed["embed"], packed["lm_head"], arch.vocab_size)
        self.ends = Ends(*ends, words, apart=bool(parts))
        self.norm = plain["norm"]
        self.collapse = tuple(plain[f"hc_head_{leaf}"] for leaf in ("fn", "base", "scale"))
        self.tables = (cos_sin, compress_cos_sin)  # [M, R] float32 each
        self.layers = [read_layer(arch, i, packed, plain, self.tables) for i in range(arch.layers)]
        self.others = [
            [read_layer(arch, i, *part, self.tables) for i in range(arch.layers)]
            for part in parts[1:]
        ]

    def for_prompts(self, parts: Sequence[Part], ranks: Ranks) -> DeepSeekV4Model:
        """The same model for chunks whose rows ranks share: over the same tables, and weights that
        include `parts`, one of each rank that decodes share, in rank order."""
        packed = {"embed": self.ends.embed, "lm_head": self.ends.head}
        return DeepSeekV4Model(
            self.arch,
            {**parts[0][0], **packed},
            parts[0][1],
            *self.tables,
            ranks.of_prompts(),
            parts,
        )

    @property
    def table_bytes(self) -> int:
        """Bytes of the position tables held beside the weights."""
        return sum(table.nbytes for table in self.tables)

    def forward(
        self,
        inputs: SegmentInputs,
        caches: Sequence[Caches],
        ops: PhaseOps,
        stop_layer: int = ALL_LAYERS,
    ) -> Hidden:
        """Run the layers below `stop_layer`, then collapse the streams and norm."""
        arch = self.arch
        last = len(self.layers) if stop_layer == ALL_LAYERS else stop_layer
        x = self.ends.words(inputs.ids, ops)  # [T, D]
        streams = x.unsqueeze(1).repeat(1, arch.streams, 1)  # [T, N, D]
        streams = self.run(self.layers[:last], caches, streams, inputs, ops)
        x = ops.hyper_head(streams, *self.collapse, norm_eps=arch.norm_eps, eps=arch.hyper_eps)
        return Hidden(ops.rmsnorm(x, self.norm, arch.norm_eps), streams)

    def normed(self, hidden: Hidden) -> Tensor:
        """What the head reads of `forward`'s result, for all rows [T, D]."""
        return hidden.normed

    def logits(self, hidden: Hidden, inputs: SegmentInputs, ops: PhaseOps) -> Tensor:
        """Logits [R, V] of the rows that need them, in float32 as the recipe has them."""
        rows = hidden.normed if inputs.logit_rows is None else hidden.normed[inputs.logit_rows]
        return self.head(rows, ops)

    def head(self, rows: Tensor, ops: PhaseOps) -> Tensor:
        """Logits [R, V] of normed rows [R, D]."""
        return self.ends.logits(rows, ops.linear_f32)

    def run(
        self,
        layers: Sequence[Layer],
        caches: Sequence[Caches],
        streams: Tensor,
        inputs: SegmentInputs,
        ops: PhaseOps,
    ) -> Tensor:
        """Layers one after the other: streams [T, N, D] in and out.

        What mixes a block's output into the streams and what stands before the next block are one
        op, across the borders of layers too.
        """
        block: tuple[Tensor, ...] = ()  # output [T, D] of the last block, and its mixing weights
        for layer, cache in zip(layers, caches, strict=False):
            streams, x, *weights = self._enter(layer.attn_site, streams, block, ops)
            block = (self._attention(x, layer, cache, inputs, ops), *weights)
            streams, x, *weights = self._enter(layer.ffn_site, streams, block, ops)
            block = (self._experts(x, layer, inputs, ops), *weights)
        return ops.hyper_mix(streams, *block) if block else streams

    def _enter(
        self,
        site: tuple[Tensor, ...],
        streams: Tensor,
        block: tuple[Tensor, ...],
        ops: PhaseOps,
    ) -> tuple[Tensor, ...]:
        """The streams with `block` mixed in, the next block's input [T, D], collapsed and normed,
        and the weights that mix its output."""
        arch = self.arch
        how = {
            "norm_eps": arch.norm_eps, "eps": arch.hyper_eps, "iters": arch.sinkhorn_iters,
        }  # fmt: skip
        if not block:
            return (streams, *ops.hyper_pre(streams, *site, **how))
        found: tuple[Tensor, ...] = ops.hyper_mix_pre(streams, *block, *site, **how)
        return found

    def _attention(
        self, x: Tensor, layer: Layer, caches: Caches, inputs: SegmentInputs, ops: PhaseOps
    ) -> Tensor:
        arch, tokens, parts = self.arch, x.shape[0], self._parts(layer)
        kept, spread = caches, inputs.spread
        if spread is not None:
            caches = spread.borrow_all(caches)
        local, groups = caches["local"], inputs.groups
        table = layer.cos_sin
        qr, kv = ops.linear(x, layer.wqkv).split((arch.q_rank, arch.head_dim), dim=-1)
        qr = ops.at("rmsnorm.q")(qr, layer.q_norm, arch.norm_eps)  # [T, q_rank]
        q = _beside([ops.linear(qr, part.wq_b) for part in parts]).view(tokens, -1, arch.head_dim)
        q = ops.latent_qkv(
            q,
            kv,
            layer.kv_norm,
            inputs.positions,
            table,
            local,
            groups[local.group].slots,
            eps=arch.norm_eps,
            norm_q=True,
        )
        if spread is not None:
            spread.share(local, kept["local"])
        where = (inputs.query_start, inputs.context_lens)
        entries = caches.get("entries")
        selected = None
        if entries is not None:
            selected = self._compress(x, qr, layer, caches, kept, inputs, ops)
        o = ops.at(layer.attn_op)(
            q,
            local,
            groups[local.group].pages,
            entries,
            None if entries is None else groups[entries.group].pages,
            selected,
            _beside([part.sinks for part in parts]),
            table,
            inputs.positions,
            *where,
            scale=arch.scale,
            window=arch.window,
            ratio=layer.ratio,
        )  # [T, H, d]
        found = []
        for part, heads in zip(parts, o.chunk(len(parts), dim=1), strict=True):
            z = ops.out_group(heads, part.wo_a, groups=arch.o_groups)  # [T, G * o_rank]
            found.append(ops.linear(z, part.wo_b))
        return self._sum(found)

    def _parts(self, layer: Layer) -> list[Layer]:
        """`layer`, and what the other ranks hold of it where that is here too."""
        return [layer, *(part[layer.number] for part in self.others)]

    def _sum(self, parts: list[Tensor]) -> Tensor:
        """What ranks hold parts of; those that are here are added as ranks would add them."""
        return self.ranks.tensor.sum(parts[0]) if len(parts) == 1 else canonical_sum(parts)

    def _compress(
        self,
        x: Tensor,
        qr: Tensor,
        layer: Layer,
        caches: Caches,
        kept: Caches,
        inputs: SegmentInputs,
        ops: PhaseOps,
    ) -> Tensor | None:
        """Write the entries of windows that close; [T, top_k] entries chosen by the indexer, or
        None where every visible one is read. `kept`: where a request stays, of which `caches` are
        copies while ranks share its rows."""
        arch, groups, spread = self.arch, inputs.groups, inputs.spread
        assert layer.compress is not None and layer.entry is not None
        rows = ops.linear_f32(x, layer.compress)  # [T, 2 C (+ 4 C' + heads)]
        kv, gate, *index = rows.split(layer.compress_rows, dim=-1)
        where = (inputs.query_start, inputs.context_lens)

        def write(op: Any, kv: Tensor, gate: Tensor, parts: Any, name: str, state: str) -> None:
            pages, raw = caches[name], caches[state]
            if spread is not None:
                biased = gate + parts.ape.to(gate.dtype)[inputs.positions % layer.ratio]
                edges = spread.edges(raw, torch.stack((kv, biased), dim=1).to(raw.data.dtype))
            op(
                kv,
                gate,
                parts.ape,
                parts.norm,
                layer.cos_sin,
                raw,
                groups[raw.group].slots,
                pages,
                groups[pages.group].slots,
                *where,
                ratio=layer.ratio,
                overlap=layer.index is not None,
                eps=arch.norm_eps,
            )
            if spread is not None:
                spread.share(pages, kept[name])
                spread.keep(kept[state], edges)

        write(ops.at(layer.compress_op), kv, gate, layer.entry, "entries", "rows")
        if layer.index is None or layer.index_q is None:
            return None
        index_kv, index_gate, g = index
        write(ops.compress_index, index_kv, index_gate, layer.index, "index", "index_rows")
        keys = caches["index"]
        q = ops.linear(qr, layer.index_q).view(-1, arch.index_heads, arch.index_dim)
        q = ops.index_query(q, inputs.positions, layer.cos_sin, keys.form)
        chosen: Tensor = ops.index_select(
            q,
            g,
            keys,
            groups[keys.group].pages,
            inputs.positions,
            *where,
            ratio=layer.ratio,
            top_k=arch.index_topk,
            scale=arch.index_scale,
        )
        return chosen

    def _experts(self, x: Tensor, layer: Layer, inputs: SegmentInputs, ops: PhaseOps) -> Tensor:
        arch = self.arch
        if layer.by_token is not None:
            ids, weights = ops.moe_route_hash(
                x, layer.gate, layer.by_token, inputs.ids, scale=arch.routed_scale
            )
        else:
            ids, weights = ops.moe_route(
                x, layer.gate, layer.bias, top_k=arch.experts_per_token, scale=arch.routed_scale
            )
        limit = arch.limit if arch.clamp_shared else 0.0
        shared: list[Tensor] = []
        for part in self._parts(layer):
            hidden = ops.swiglu_clamp(ops.linear(x, part.shared13), limit)
            shared.append(ops.linear(hidden, part.shared2))
        ranks = self.ranks
        if ranks.domains.size > 1:  # the tokens of all domains meet at the experts
            x, ids, weights = (ranks.domains.rows(part) for part in (x, ids, weights))
        if ranks.expert.size > 1:
            ids = self._held(ids)
        beside = shared[0] if ranks.domains.size == 1 else None
        routed: Tensor = ops.moe_experts(
            x, ids, weights, layer.w13, layer.w2, beside, limit=arch.limit
        )
        if beside is not None:
            return ranks.tensor.sum(routed)
        return self._own(routed) + self._sum(shared)

    def _held(self, ids: Tensor) -> Tensor:
        """Ids as this rank numbers the experts that it holds; -1 for those of others."""
        count = self.arch.experts // self.ranks.expert.size
        local = ids - self.ranks.expert.rank * count
        return local.where((local >= 0) & (local < count), -1)

    def _own(self, routed: Tensor) -> Tensor:
        """This domain's rows of what all ranks computed for the tokens of all domains."""
        domains, expert = self.ranks.domains, self.ranks.expert
        if expert.size == domains.size:
            return expert.sum_rows(routed)
        return expert.sum(routed).view(domains.size, -1, routed.shape[1])[domains.rank]


def _beside(parts: list[Tensor]) -> Tensor:
    """Parts of heads, side by side in the last dimension."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
