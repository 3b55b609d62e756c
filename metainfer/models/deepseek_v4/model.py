"""DeepSeek-V4-Flash, as its technical report writes it.

Shapes: T tokens, N residual streams, D hidden, H query heads, d head width (keys and values are one
latent), R rotated channels, G output groups, E experts, F expert width, V vocabulary.
Every computation goes through `ops`, the table of implementations that the plan chose for this
phase; nothing here knows a device, a dtype, a packing or a cache format. Where ranks share the
model, H, G and F are those of one rank, experts may lie whole on ranks, and `wo_b`, the experts and
the shared expert give parts of sums; latents, entries and the indexer are on every rank. Where they
share a chunk's rows, a rank has all heads, in parts, and adds these sums up by itself. Where they
share a cache, each holds a part of the chosen entries and of their keys; windows are on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metainfer.comm.exact import canonical_sum
from metainfer.comm.peers import SINGLE, Ranks
from metainfer.comm.side import IN_ORDER, Done, Pending, Side
from metainfer.core.step import ALL_LAYERS
from metainfer.kernels.table import PhaseOps
from metainfer.models.common.dealt import Dealt
from metainfer.models.common.ends import Ends
from metainfer.models.common.inputs import SegmentInputs
from metainfer.models.common.lanes import Lane, alone
from metainfer.models.common.meeting import send_rounded, send_rows
from metainfer.models.common.spread import Part
from metainfer.models.common.summed import start_summed
from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch
from metainfer.models.deepseek_v4.layer import Layer, read_layer
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.moe_experts.rounded import Rows

Caches = Mapping[str, Any]


@dataclass(slots=True)
class Hidden:
    """What the layers leave: `normed` [T, D] for the head, `streams` [T, N, D] for a draft."""

    normed: Tensor
    streams: Tensor


class DeepSeekV4Model:
    """Holds weights; `forward` runs one segment, `logits` the head. `parts`: see `for_prompts`.
    `beside`: where the shared expert of at most `beside_rows` rows is computed meanwhile; that of
    more is computed ahead of the routed ones. `rounded_from`: from so many rows on, what domains
    send to the experts is rounded first where those take it so; 0: never."""

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
        self.arch, self.ranks, self.dealt = arch, ranks, Dealt(ranks.shards)
        self.beside: Side = IN_ORDER
        self.beside_rows = self.rounded_from = 0
        words = ranks.prompts if len(parts) > 1 else ranks.tensor
        ends = (packed["embed"], packed["lm_head"], arch.vocab_size)
        self.ends = Ends(*ends, words, apart=bool(parts))
        self.norm = plain["norm"]
        self.collapse = tuple(plain[f"hc_head_{leaf}"] for leaf in ("fn", "base", "scale"))
        self.tables = (cos_sin, compress_cos_sin)  # [M, R] float32 each
        self.numbers = self._numbers(cos_sin.device)
        self.layers = [read_layer(arch, i, packed, plain, self.tables) for i in range(arch.layers)]
        self.others = [
            [read_layer(arch, i, *part, self.tables) for i in range(arch.layers + arch.mtp)]
            for part in parts[1:]
        ]

    def for_prompts(self, parts: Sequence[Part], ranks: Ranks) -> DeepSeekV4Model:
        """The same model for chunks whose rows ranks share: over the same tables, and weights that
        include `parts`, one of each rank that decodes share, in rank order."""
        packed = {"embed": self.ends.embed, "lm_head": self.ends.head}
        found = DeepSeekV4Model(
            self.arch,
            {**parts[0][0], **packed},
            parts[0][1],
            *self.tables,
            ranks.of_prompts(),
            parts,
        )
        found.rounded_from = self.rounded_from
        return found

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
        return alone(self.lane(inputs, caches, ops, stop_layer))

    def lane(
        self,
        inputs: SegmentInputs,
        caches: Sequence[Caches],
        ops: PhaseOps,
        stop_layer: int = ALL_LAYERS,
    ) -> Lane[Hidden]:
        """`forward` as a lane."""
        arch = self.arch
        last = len(self.layers) if stop_layer == ALL_LAYERS else stop_layer
        x = self.ends.words(inputs.ids, ops)  # [T, D]
        streams = x.unsqueeze(1).repeat(1, arch.streams, 1)  # [T, N, D]
        streams = yield from self.run(self.layers[:last], caches, streams, inputs, ops)
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
    ) -> Lane[Tensor]:
        """Layers one after the other: streams [T, N, D] in and out.

        What mixes a block's output into the streams and what stands before the next block are one
        op, across the borders of layers too.
        """
        block: tuple[Tensor, ...] = ()  # output [T, D] of the last block, and its mixing weights
        for layer, cache in zip(layers, caches, strict=False):
            streams, x, *weights = self._enter(layer.attn_site, streams, block, ops)
            attended = self._attention(x, layer, cache, inputs, ops)
            if self.ranks.tensor.size > 1:  # else nothing is waited for before the experts
                yield
            block = (attended.wait(), *weights)
            streams, x, *weights = self._enter(layer.ffn_site, streams, block, ops)
            mixed = yield from self._experts(x, layer, inputs, ops)
            block = (mixed, *weights)
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
    ) -> Pending[Tensor]:
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
        arriving = list[Pending[None]]()
        if spread is not None:
            arriving.append(spread.start_share(local, kept["local"]))
        where = (inputs.query_start, inputs.context_lens)
        entries = caches.get("entries")
        selected = None
        if entries is not None:
            selected = self._compress(x, qr, layer, caches, kept, arriving, inputs, ops)
        _wait(arriving)
        if entries is not None and entries.parts > 1:
            o = self._over_parts(q, selected, local, entries, layer, inputs, ops)
        else:
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

        def project(heads: Tensor, part: Layer = layer) -> Tensor:
            z = ops.out_group(heads, part.wo_a, groups=arch.o_groups)  # [T, G * o_rank]
            out: Tensor = ops.linear(z, part.wo_b)
            return out

        if len(parts) == 1:
            return start_summed(project, (o,), self.ranks.tensor, self.ranks.turns)
        split = zip(o.chunk(len(parts), dim=1), parts, strict=True)
        return self._start_sum([project(heads, part) for heads, part in split])

    def _over_parts(
        self,
        q: Tensor,
        selected: Tensor | None,
        local: Any,
        entries: Any,
        layer: Layer,
        inputs: SegmentInputs,
        ops: PhaseOps,
    ) -> Tensor:
        """Attention [T, H, d] over a window that is here, and entries that are dealt over ranks.

        The window of its own heads each rank mixes by itself, with their sinks, so that nothing is
        counted twice. `selected` [T, top_k]: chosen entries that are here, by this rank's numbers.
        """
        arch, groups, dealt = self.arch, inputs.groups, self.dealt
        assert selected is not None
        back = torch.arange(arch.window, dtype=torch.int32, device=q.device)
        window = inputs.positions.int().unsqueeze(1) - back  # [T, window]; negative: none
        near, near_log = ops.at("attn_part.window")(
            q,
            local,
            groups[local.group].pages,
            window,
            layer.sinks,
            inputs.query_start,
            scale=arch.scale,
        )
        mixed, log = ops.at("attn_part.csa")(
            dealt.heads(q),
            entries,
            groups[entries.group].pages,
            selected,
            None,
            inputs.query_start,
            scale=arch.scale,
        )
        logs = dealt.logs(torch.cat((log, near_log), dim=1))  # [N, T, N H + H]
        parts = ops.attn_weigh(
            q, mixed, logs, near, layer.cos_sin, inputs.positions, rank=dealt.rank
        )
        return dealt.merged(parts)

    def _parts(self, layer: Layer) -> list[Layer]:
        """`layer`, and what the other ranks hold of it where that is here too."""
        return [layer, *(part[layer.number] for part in self.others)]

    def _start_sum(self, parts: list[Tensor]) -> Pending[Tensor]:
        """What ranks hold parts of; those that are here are added as ranks would add them."""
        if len(parts) > 1:
            return Done(canonical_sum(parts))
        return self.ranks.tensor.start_sum(parts[0])

    def _compress(
        self,
        x: Tensor,
        qr: Tensor,
        layer: Layer,
        caches: Caches,
        kept: Caches,
        arriving: list[Pending[None]],
        inputs: SegmentInputs,
        ops: PhaseOps,
    ) -> Tensor | None:
        """Write the entries of windows that close; [T, top_k] entries chosen by the indexer, of
        those that are here where keys are dealt, or None where every visible one is read. `kept`:
        where a request stays, of which `caches` are copies while ranks share its rows; those of
        other ranks are `arriving`."""
        arch, groups, spread = self.arch, inputs.groups, inputs.spread
        assert layer.compress is not None and layer.entry is not None
        rows = ops.linear_f32(x, layer.compress)  # [T, 2 C (+ 4 C' + heads)]
        kv, gate, *index = rows.split(layer.compress_rows, dim=-1)

        def write(op: Any, kv: Tensor, gate: Tensor, parts: Any, name: str, state: str) -> None:
            pages, raw = caches[name], caches[state]
            shared = spread is not None and spread.shares_rows
            if spread is not None and shared:
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
                inputs.query_start,
                inputs.context_lens,
                ratio=layer.ratio,
                overlap=layer.index is not None,
                eps=arch.norm_eps,
            )
            if spread is not None:
                arriving.append(spread.start_share(pages, kept[name]))
            if spread is not None and shared:
                spread.keep(kept[state], edges)

        write(ops.at(layer.compress_op), kv, gate, layer.entry, "entries", "rows")
        if layer.index is None or layer.index_q is None:
            return None
        index_kv, index_gate, g = index
        write(ops.compress_index, index_kv, index_gate, layer.index, "index", "index_rows")
        keys = caches["index"]
        q = ops.linear(qr, layer.index_q).view(-1, arch.index_heads, arch.index_dim)
        q = ops.index_query(q, inputs.positions, layer.cos_sin, keys.form)
        _wait(arriving)
        return self._choose(q, g, keys, layer, inputs, ops)

    def _choose(
        self,
        q: Tensor,
        g: Tensor,
        keys: Any,
        layer: Layer,
        inputs: SegmentInputs,
        ops: PhaseOps,
    ) -> Tensor:
        """[T, top_k] entries by the indexer's queries and weights [T, heads] `g`; where `keys` are
        dealt, those of them that are here."""
        arch, pages = self.arch, inputs.groups[keys.group].pages
        how: dict[str, Any] = {"top_k": arch.index_topk, "scale": arch.index_scale}
        if keys.parts == 1:
            where = (inputs.positions, inputs.query_start, inputs.context_lens)
            chosen: Tensor = ops.index_select(q, g, keys, pages, *where, ratio=layer.ratio, **how)
            return chosen
        visible = self.dealt.held((inputs.positions + 1) // layer.ratio)
        found, values = ops.index_part(q, g, keys, pages, visible, inputs.query_start, **how)
        own: Tensor = ops.index_merge(*self.dealt.choices(found, values), rank=self.dealt.rank)
        return own

    def _experts(
        self, x: Tensor, layer: Layer, inputs: SegmentInputs, ops: PhaseOps
    ) -> Lane[Tensor]:
        arch, ranks = self.arch, self.ranks
        apart = None
        if x.shape[0] <= self.beside_rows and ranks.domains.size == 1:
            apart = self.beside.fork(lambda: self._shared(x, layer, ops))
        if layer.by_token is not None:
            ids, weights = ops.moe_route_hash(
                x, layer.gate, layer.by_token, inputs.ids, scale=arch.routed_scale
            )
        else:
            ids, weights = ops.moe_route(
                x, layer.gate, layer.bias, top_k=arch.experts_per_token, scale=arch.routed_scale
            )
        if ranks.domains.size > 1:
            return (yield from self._over_domains(x, ids, weights, layer, ops))
        if apart is not None:
            routed = self._routed(x, ids, weights, None, layer, ops)
            routed += apart.wait()[0]
            total = ranks.tensor.start_sum(routed)
        else:
            rows = (x, ids, weights, self._shared(x, layer, ops)[0])

            def both(x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
                return self._routed(x, ids, weights, shared, layer, ops)

            total = start_summed(both, rows, ranks.tensor, ranks.turns)
        yield
        return total.wait()

    def _over_domains(
        self, x: Tensor, ids: Tensor, weights: Tensor, layer: Layer, ops: PhaseOps
    ) -> Lane[Tensor]:
        """The tokens of all domains meet at the experts; the shared one is computed meanwhile."""
        domains, expert = self.ranks.domains, self.ranks.expert
        rounds = ops.rounding("moe_experts")
        if rounds is not None and 0 < self.rounded_from <= x.shape[0]:
            arriving = send_rounded(domains, rounds(x, layer.w13), ids, weights)
        else:
            arriving = send_rows(domains, x, ids, weights)
        shared = self._start_sum(self._shared(x, layer, ops))
        yield
        routed = self._routed(*arriving(), None, layer, ops)
        # This domain's rows of what all ranks computed for the tokens of all domains.
        every = expert.size != domains.size
        summed = (expert.start_sum if every else expert.start_sum_rows)(routed)
        yield
        own = summed.wait()
        if every:
            own = own.view(domains.size, -1, own.shape[1])[domains.rank]
        return own + shared.wait()

    def _shared(self, x: Tensor, layer: Layer, ops: PhaseOps) -> list[Tensor]:
        """The shared expert of rows x [T, D], in the parts that are here."""
        limit = self.arch.limit if self.arch.clamp_shared else 0.0
        found = []
        for part in self._parts(layer):
            hidden = ops.swiglu_clamp(ops.linear(x, part.shared13), limit)
            found.append(ops.linear(hidden, part.shared2))
        return found

    def _routed(
        self,
        x: Rows,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        layer: Layer,
        ops: PhaseOps,
    ) -> Tensor:
        """The experts that are here, with `shared` added."""
        if self.ranks.expert.size > 1:
            # One launch: a comparison a side, and what joins them, cost a decode step five a layer.
            ids = self.numbers.index_select(0, ids.reshape(-1)).view(ids.shape)
        found: Tensor = ops.moe_experts(
            x, ids, weights, layer.w13, layer.w2, shared, limit=self.arch.limit
        )
        return found

    def _numbers(self, device: torch.device) -> Tensor:
        """This rank's number of each expert [E] int32, -1 for those of others."""
        expert = self.ranks.expert
        count = self.arch.experts // expert.size
        numbers = torch.full((self.arch.experts,), -1, dtype=torch.int32, device=device)
        own = torch.arange(count, dtype=torch.int32, device=device)
        numbers[expert.rank * count : (expert.rank + 1) * count] = own
        return numbers


def _wait(arriving: list[Pending[None]]) -> None:
    """For all of them, once."""
    while arriving:
        arriving.pop(0).wait()


def _beside(parts: list[Tensor]) -> Tensor:
    """Parts of heads, side by side in the last dimension."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
