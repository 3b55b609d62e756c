"""Llama, Mistral, Qwen2, Qwen3 (and what shares their shape: SmolLM2): config -> `DenseArch`.

One decoder layer is ``x += attn(norm(x)); x += mlp(norm(x))`` with grouped-query attention, rotary
positions and a SwiGLU mlp. The families differ in which projections carry a bias, in a norm per
query/key head (Qwen3), in which layers see a sliding window, in tied embeddings. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from metainfer.core.errors import ModelError
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
from metainfer.core.verdict import Verdict
from metainfer.kernels.impl import OpRequest
from metainfer.kv.book.form import plain
from metainfer.kv.book.spec import CacheSpec, GroupKind
from metainfer.models.arch import Cut, WeightSpec, unknown_options
from metainfer.models.common.adapters import AdapterSet, read_adapters
from metainfer.models.common.config import ConfigReader, token_ids
from metainfer.models.common.rope import read_rope
from metainfer.models.dense import cost, placement
from metainfer.ops.rope.spec import RopeSpec
from metainfer.ops.workspaces import FILTER_BYTES

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_QKV_BIAS_ALWAYS = ("qwen2",)
_QK_NORM = ("qwen3",)

TYPICAL_CONTEXT = 1024
"""Cached tokens per sequence at which attention's candidates are ranked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseArch:
    """Everything that shapes a dense model. Widths in elements, `windows` in tokens (0 = full).

    `ranks`: how many share each matrix; of one rank, heads and ffn are its own. `shards`: ranks
    over which keys and values of whole sequences are dealt.
    """

    family: str
    layers: int
    vocab_size: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int, ...]
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...] = ()
    ranks: int = 1
    shards: int = 1
    adapters: AdapterSet | None = None

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        return (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )

    def with_options(self, options: Mapping[str, str]) -> DenseArch:
        """No dense family has a switch."""
        return unknown_options(self, options, ())

    def with_draft(self) -> DenseArch:
        """No dense family brings a draft layer; the planner refuses the wish before it asks."""
        return self

    def with_adapters(self, folders: Mapping[str, Path]) -> DenseArch:
        return replace(self, adapters=read_adapters(self.packed_weights(), folders))

    @property
    def page_unit(self) -> int:
        return 1

    def cache_specs(self, dtype: str, layouts: Mapping[str, str]) -> tuple[CacheSpec, ...]:
        """K and V of one token in one layer: ``2 * Hkv * D`` elements."""
        form = plain(layouts["kv"], self.head_dim, dtype, parts=2, heads=self.kv_heads)
        return tuple(
            CacheSpec(
                layer=layer,
                name="kv",
                kind=GroupKind.WINDOW if window else GroupKind.PAGED,
                form=form,
                window=window,
            )
            for layer, window in enumerate(self.windows)
        )

    def packed_weights(self) -> tuple[WeightSpec, ...]:
        found = [
            WeightSpec(
                "embed", "embed", ("model.embed_tokens.weight",), (self.vocab_size, self.hidden)
            )
        ]
        for layer in range(self.layers):
            found += self._layer_matrices(layer)
        head = "model.embed_tokens.weight" if self.tied else "lm_head.weight"
        found.append(
            WeightSpec("lm_head", "linear.lm_head", (head,), (self.vocab_size, self.hidden))
        )
        return tuple(found)

    def _layer_matrices(self, layer: int) -> list[WeightSpec]:
        prefix = f"model.layers.{layer}"

        def matrix(
            site: str,
            parts: tuple[str, ...],
            rows: tuple[int, ...],
            width: int,
            bias: bool,
            units: tuple[int, ...] = (),
        ) -> WeightSpec:
            names = tuple(f"{prefix}.{part}_proj" for part in parts)
            return WeightSpec(
                f"layers.{layer}.{site}",
                f"linear.{site}",
                tuple(f"{name}.weight" for name in names),
                (sum(rows), width),
                tuple(f"{name}.bias" for name in names) if bias else (),
                layer,
                rows,
                units=units,
                grains=(self.head_dim,) * len(units),
            )

        hidden, ffn, head = self.hidden, self.ffn, self.head_dim
        group = self.heads // self.kv_heads * head  # query rows that read one KV head
        qkv = ("self_attn.q", "self_attn.k", "self_attn.v")
        return [
            matrix("qkv", qkv, self.qkv_rows, hidden, self.qkv_bias, (group, head, head)),
            matrix("o", ("self_attn.o",), (hidden,), self.qkv_rows[0], self.o_bias, (group,)),
            matrix("gate_up", ("mlp.gate", "mlp.up"), (ffn, ffn), hidden, self.mlp_bias),
            matrix("down", ("mlp.down",), (hidden,), ffn, self.mlp_bias),
        ]

    def plain_weights(self) -> tuple[WeightSpec, ...]:
        found = []
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            parts = [
                ("attn_norm", "input_layernorm", self.hidden),
                ("mlp_norm", "post_attention_layernorm", self.hidden),
            ]
            if self.qk_norm:
                parts += [
                    ("q_norm", "self_attn.q_norm", self.head_dim),
                    ("k_norm", "self_attn.k_norm", self.head_dim),
                ]
            for name, tensor, width in parts:
                key = f"layers.{layer}.{name}"
                tensors = (f"{prefix}.{tensor}.weight",)
                found.append(WeightSpec(key, "rmsnorm", tensors, (width,), (), layer))
        found.append(WeightSpec("norm", "rmsnorm", ("model.norm.weight",), (self.hidden,)))
        return tuple(found)

    def op_requests(
        self,
        phase: Phase,
        rows: int,
        logit_rows: int,
        dtype: str,
        schemes: Mapping[str, tuple[str, ...]],
        page_tokens: int,
    ) -> tuple[OpRequest, ...]:
        def ask(
            op: str, shape: Mapping[str, int], count: int, *semantics: str, site: str = ""
        ) -> OpRequest:
            site = site or op
            return OpRequest(
                op,
                site,
                phase,
                dtype,
                {"rows": rows, **shape},
                frozenset(semantics),
                schemes.get(site, ()),
                count,
            )

        heads = {"hq": self.heads, "hkv": self.kv_heads, "d": self.head_dim}
        layers, width = self.layers, {"d": self.hidden}
        found = [
            ask("embed", {"n": -(-self.vocab_size // self.ranks), **width}, 1),
            ask("rmsnorm", width, 1 + (2 * layers if self.qk_norm else 0)),
            ask("add_rmsnorm", width, 2 * layers),
            ask("rope", {**heads, "rotated": self.rope.rotated}, layers, *self._rope_needs()),
            ask("kv_write", {**heads, "page": page_tokens}, layers),
            ask("swiglu", {"f": self.ffn}, layers),
            ask("sample", {"v": self.vocab_size, "rows": logit_rows}, 1),
        ]
        short = phase in (Phase.DECODE, Phase.VERIFY)  # else a dealt cache is read as a copy
        context = min(self.max_context, TYPICAL_CONTEXT)
        span = {**heads, "seqs": rows if short else 1, "context": context}
        whole = layers
        if self.shards > 1 and short:
            whole -= self.windows.count(0)
            part = {"hq": self.heads * self.shards, "shards": self.shards}
            page = page_tokens // self.shards
            found.append(ask("attn_paged_part", {**span, **part, "page": page}, layers - whole))
            width = {"d": self.head_dim, "rotated": 0}
            found.append(ask("attn_weigh", {**width, **part}, layers - whole))
        if whole:
            windowed = max(self.windows)
            shape = {**span, "page": page_tokens} | ({"window": windowed} if windowed else {})
            found.append(ask("attn_paged", shape, whole, *(("window",) if windowed else ())))
        for spec in (*self._layer_matrices(0), self.packed_weights()[-1]):
            shape = {"n": spec.shape[0], "k": spec.shape[1]}
            if spec.layer < 0:
                shape |= {"n": -(-shape["n"] // self.ranks), "rows": logit_rows}
            bias = ("bias",) if spec.bias else ()
            count = layers if spec.layer >= 0 else 1
            found.append(ask("linear", shape, count, *bias, site=spec.site))
        if self.adapters is not None:
            found += self.adapters.requests(phase, rows, logit_rows, dtype)
        return tuple(found)

    def _rope_needs(self) -> list[str]:
        """What `rope` must honour beyond rotating whole heads by halves."""
        needs = {
            "interleaved": self.rope.interleaved,
            "partial": self.rope.rotated < self.head_dim,
        }
        return [name for name, needed in needs.items() if needed]

    @property
    def routed_experts(self) -> int:
        return 0

    def cut(self, spec: WeightSpec, layout: LayoutPlan) -> tuple[Cut, int]:
        return placement.cut(spec, layout)

    def layout_objections(
        self, layout: LayoutPlan, blocks: Mapping[str, tuple[int, int]]
    ) -> Verdict:
        return placement.objections(self, layout, blocks)

    def on_rank(self, layout: LayoutPlan) -> DenseArch:
        return placement.on_rank(self, layout)

    def costs(self) -> cost.Costs:
        return cost.Costs(self)

    def table_bytes(self, positions: int) -> int:
        """The float32 table of cosines and sines."""
        return positions * self.rope.rotated * 4

    def activation_bytes(self, rows: int, logit_rows: int, dtype_bytes: int) -> int:
        """Residual, normed input, the widest pair of intermediates and what adapters compute with;
        or, once that is over, the stream, float32 logits and what sampling takes for them."""
        widest = max(3 * self.ffn, sum(self.qkv_rows) + self.heads * self.head_dim)
        low = self.adapters.transient_bytes(rows, dtype_bytes) if self.adapters else 0
        layers = rows * (3 * self.hidden + widest) * dtype_bytes + low
        drawn = logit_rows * self.vocab_size * (4 + FILTER_BYTES)
        return max(layers, 2 * rows * self.hidden * dtype_bytes + drawn)


def read_arch(config: Mapping[str, object], where: str = "config.json") -> DenseArch:
    """Read a Hugging Face config of one of `FAMILIES`.

    Raises:
        ModelError: a missing, unsupported or unknown key, naming it.
    """
    reader = ConfigReader(config, where)
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise ModelError(
            f"{where} has model_type {family!r}.",
            f"Dense families: {', '.join(FAMILIES)}.",
            code="unsupported_model",
        )
    layers = reader.required("num_hidden_layers", int)
    hidden = reader.required("hidden_size", int)
    heads = reader.required("num_attention_heads", int)
    kv_heads = reader.optional("num_key_value_heads", int, heads)
    if min(layers, hidden, heads, kv_heads) <= 0 or heads % kv_heads:
        raise ModelError(
            f"{where} has {heads} query heads over {kv_heads} KV heads in {layers} layers "
            f"of width {hidden}.",
            "Query heads must be a positive multiple of KV heads.",
            code="bad_config",
        )
    default_dim = 128 if family == "qwen3" else hidden // heads
    head_dim = reader.optional("head_dim", int, default_dim)
    default_context = {"llama": 2048, "mistral": 131072}.get(family, 32768)
    max_context = reader.optional("max_position_embeddings", int, default_context)
    reader.only("hidden_act", ("silu", "swish"))
    attention_bias = family in ("llama", "qwen3") and reader.optional("attention_bias", bool, False)
    arch = DenseArch(
        family=family,
        layers=layers,
        vocab_size=reader.required("vocab_size", int),
        hidden=hidden,
        ffn=reader.required("intermediate_size", int),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=max_context,
        norm_eps=reader.optional("rms_norm_eps", float, 1e-6),
        rope=read_rope(reader, head_dim=head_dim, max_positions=max_context),
        windows=_windows(reader, family, layers),
        tied=reader.optional("tie_word_embeddings", bool, False),
        qkv_bias=attention_bias or family in _QKV_BIAS_ALWAYS,
        o_bias=attention_bias,
        mlp_bias=family == "llama" and reader.optional("mlp_bias", bool, False),
        qk_norm=family in _QK_NORM,
        eos_token_ids=token_ids(config, "eos_token_id"),
    )
    reader.finish()
    return arch


def _windows(reader: ConfigReader, family: str, layers: int) -> tuple[int, ...]:
    """Each layer's sliding window in tokens, 0 for full attention."""
    if family == "llama":
        return (0,) * layers
    window = 0 if reader.null("sliding_window") else reader.optional("sliding_window", int, 4096)
    if family == "mistral":
        return (window,) * layers
    used = reader.optional("use_sliding_window", bool, False)
    first = reader.optional("max_window_layers", int, 28)
    kinds = reader.sequence("layer_types")
    if not used:
        return (0,) * layers
    if kinds is None:
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"layer_types has {len(kinds)} entries of {sorted(set(map(str, kinds)))} "
            f"for {layers} layers.",
            "Expected one of full_attention, sliding_attention per layer.",
            code="bad_config",
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
