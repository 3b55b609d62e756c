"""DeepSeek-V4-Flash: config -> `DeepSeekV4Arch`, its layer mix and caches. No torch.

Every layer keeps the latents of a sliding window. A layer with compression ratio 4 (CSA) adds one
latent and one index key for each 4 tokens, one with ratio 128 (HCA) one latent for each 128; both
carry raw rows of windows that have not closed (`ops/compress`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from metainfer.core.errors import ModelError
from metainfer.kv.book.spec import CacheSpec, GroupKind, Rewind
from metainfer.models.common.config import ConfigReader, token_ids

FAMILY = "deepseek_v4"
CSA, HCA = 4, 128
FLOAT32 = 4


class LatentFormat(StrEnum):
    """How a latent is stored: all bf16; e4m3 with a bf16 tail ("fp8_ds_mla"); e2m1 likewise."""

    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


class IndexFormat(StrEnum):
    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Context extension of the layers that compress. The amplitude stays 1: no mscale."""

    factor: float
    beta_fast: float
    beta_slow: float
    original: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekV4Arch:
    """Everything that shapes the model. Widths in elements; `ratios` per layer (0, 4 or 128)."""

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
    ratios: tuple[int, ...]
    theta: float
    compress_theta: float
    yarn: Yarn
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
    draft_layers: int = 0
    dspark_block: int = 0
    eos_token_ids: tuple[int, ...] = ()

    @property
    def family(self) -> str:
        return FAMILY

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def latent_bytes(self, form: LatentFormat) -> int:
        """Bytes of one latent, padding included: 1024, 584 or 384 of V4's 448 + 64 channels."""
        plain, tail = self.head_dim - self.rope_dim, 2 * self.rope_dim
        if form is LatentFormat.BF16:
            return 2 * self.head_dim
        if form is LatentFormat.FP8:  # a scale byte per 64 channels, padded to 8
            return plain + tail + _up(-(-plain // 64), 8)
        return plain // 2 + tail + _up(plain // 16, 32)  # a scale byte per 16 channels

    def index_bytes(self, form: IndexFormat) -> int:
        """Bytes of one index key: 256, 132 (one float32 scale) or 68 (a scale byte per 32)."""
        if form is IndexFormat.BF16:
            return 2 * self.index_dim
        if form is IndexFormat.FP8:
            return self.index_dim + FLOAT32
        return self.index_dim // 2 + self.index_dim // 32

    def cache_specs(
        self, latent: LatentFormat, index: IndexFormat, layout: str
    ) -> tuple[CacheSpec, ...]:
        """Window, compressed entries, index keys and raw rows of every layer, in layer order.

        Raw rows are float32, kv and z: two windows of 2 D channels (CSA), two of twice the index
        width (its keys), one of D (HCA). HCA's are clean where a window closes; CSA's never are,
        for the next window needs this one's rows.
        """
        each, key = self.latent_bytes(latent), self.index_bytes(index)
        found: list[CacheSpec] = []
        for layer, ratio in enumerate(self.ratios):
            found.append(
                CacheSpec(
                    layer=layer,
                    name="latent",
                    kind=GroupKind.WINDOW,
                    layout=f"{layout}-{latent}",
                    entry_bytes=each,
                    window=self.window,
                )
            )
            if ratio:
                found.append(_entries(layer, "latent", f"{layout}-{latent}", each, ratio))
                width = self.head_dim * (2 if ratio == CSA else 1)
                found.append(_rows(layer, "rows", layout, width, ratio))
            if ratio == CSA:
                found.append(_entries(layer, "index", f"{layout}-{index}", key, ratio))
                found.append(_rows(layer, "index-rows", layout, 2 * self.index_dim, ratio))
        return tuple(found)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _entries(layer: int, name: str, layout: str, entry_bytes: int, ratio: int) -> CacheSpec:
    return CacheSpec(
        layer=layer,
        name=name,
        kind=GroupKind.PAGED,
        layout=layout,
        entry_bytes=entry_bytes,
        tokens_per_entry=ratio,
    )


def _rows(layer: int, name: str, layout: str, width: int, ratio: int) -> CacheSpec:
    """Raw rows of the windows that an unfinished one still needs."""
    rows = 2 * ratio if ratio == CSA else ratio
    return CacheSpec(
        layer=layer,
        name=name,
        kind=GroupKind.STATE,
        layout=f"{layout}-rows",
        state_bytes=rows * 2 * width * FLOAT32,
        rewind=Rewind.SNAPSHOT,
        clean_tokens=0 if ratio == CSA else ratio,
    )


def bytes_per_token(specs: tuple[CacheSpec, ...]) -> Fraction:
    """What one more token costs in the long run: entries over their ratios, without windows."""
    paged = (spec for spec in specs if spec.kind is GroupKind.PAGED)
    return sum((Fraction(spec.entry_bytes, spec.tokens_per_entry) for spec in paged), Fraction(0))


def bytes_per_sequence(specs: tuple[CacheSpec, ...]) -> tuple[int, int]:
    """What every long sequence holds whatever its length: window entries, and raw rows."""
    window = sum(spec.window * spec.entry_bytes for spec in specs)
    return window, sum(spec.state_bytes for spec in specs)


def read_arch(config: Mapping[str, object], where: str = "config.json") -> DeepSeekV4Arch:
    """Read the config of DeepSeek-V4-Flash (April, DSpark and 0731 files).

    Raises:
        ModelError: a missing, unsupported or unknown key, naming it.
    """
    if config.get("model_type") != FAMILY:
        raise ModelError(
            f"{where} has model_type {config.get('model_type')!r}.",
            f"Expected {FAMILY}.",
            code="unsupported_model",
        )
    reader = ConfigReader(config, where)
    _fixed(reader)
    layers = reader.required("num_hidden_layers", int)
    drafts = reader.optional("num_nextn_predict_layers", int, 0)
    block = reader.optional("dspark_block_size", int, 0)
    for key in ("dspark_noise_token_id", "dspark_markov_rank"):
        reader.optional(key, int, 0)
    reader.sequence("dspark_target_layer_ids")
    arch = DeepSeekV4Arch(
        layers=layers,
        vocab_size=reader.required("vocab_size", int),
        hidden=reader.required("hidden_size", int),
        heads=reader.required("num_attention_heads", int),
        head_dim=reader.required("head_dim", int),
        rope_dim=reader.required("qk_rope_head_dim", int),
        q_rank=reader.required("q_lora_rank", int),
        o_groups=reader.required("o_groups", int),
        o_rank=reader.required("o_lora_rank", int),
        window=reader.required("sliding_window", int),
        ratios=_ratios(reader, layers, where),
        theta=reader.required("rope_theta", float),
        compress_theta=reader.required("compress_rope_theta", float),
        yarn=_yarn(reader, where),
        max_context=reader.required("max_position_embeddings", int),
        index_heads=reader.required("index_n_heads", int),
        index_dim=reader.required("index_head_dim", int),
        index_topk=reader.required("index_topk", int),
        streams=reader.required("hc_mult", int),
        sinkhorn_iters=reader.required("hc_sinkhorn_iters", int),
        hyper_eps=reader.required("hc_eps", float),
        norm_eps=reader.required("rms_norm_eps", float),
        ffn=reader.required("moe_intermediate_size", int),
        experts=reader.required("n_routed_experts", int),
        experts_per_token=reader.required("num_experts_per_tok", int),
        routed_scale=reader.required("routed_scaling_factor", float),
        hash_layers=reader.required("num_hash_layers", int),
        limit=reader.required("swiglu_limit", float),
        draft_layers=drafts,
        dspark_block=block,
        eos_token_ids=token_ids(config, "eos_token_id"),
    )
    reader.finish()
    _check(arch, where)
    return arch


def _fixed(reader: ConfigReader) -> None:
    """Keys with one meaning that is built."""
    reader.only("num_key_value_heads", (1,))
    reader.only("n_shared_experts", (1,))
    reader.only("scoring_func", ("sqrtsoftplus",))
    reader.only("topk_method", ("noaux_tc",))
    reader.only("norm_topk_prob", (True,))
    reader.only("hidden_act", ("silu",))
    reader.only("attention_bias", (False,))
    reader.only("tie_word_embeddings", (False,))
    reader.only("expert_dtype", ("fp4", "fp8"))
    reader.only("n_group", (1,))
    reader.only("topk_group", (1,))


def _ratios(reader: ConfigReader, layers: int, where: str) -> tuple[int, ...]:
    """Each layer's ratio. What follows the layers is the draft's: window only."""
    found = reader.sequence("compress_ratios")
    if found is None or len(found) < layers or any(found[layers:]):
        raise ModelError(
            f"{where} has compress_ratios = {found!r} for {layers} layers.",
            "Expected one per layer, then zeros for the draft.",
            code="bad_config",
        )
    ratios = []
    for value in found[:layers]:
        if isinstance(value, bool) or not isinstance(value, int) or value not in (0, CSA, HCA):
            raise ModelError(
                f"{where} has {value!r} in compress_ratios, which is not supported.",
                f"Supported: 0, {CSA}, {HCA}.",
                code="unsupported_config",
            )
        ratios.append(value)
    return tuple(ratios)


def _yarn(reader: ConfigReader, where: str) -> Yarn:
    table = reader.mapping("rope_scaling")
    if table is None:
        raise ModelError(f"{where} has no rope_scaling.", "Expected YaRN's.", code="bad_config")
    inner = ConfigReader(table, f"{where}'s rope_scaling")
    for key in ("type", "rope_type"):
        inner.only(key, ("yarn",))
    yarn = Yarn(
        factor=inner.required("factor", float),
        beta_fast=inner.required("beta_fast", float),
        beta_slow=inner.required("beta_slow", float),
        original=inner.required("original_max_position_embeddings", int),
    )
    inner.finish()
    return yarn


def _check(arch: DeepSeekV4Arch, where: str) -> None:
    """Numbers that must fit each other."""
    wrong = [
        text
        for ok, text in (
            (0 < arch.rope_dim < arch.head_dim, "qk_rope_head_dim must lie below head_dim"),
            (arch.rope_dim % 2 == 0, "qk_rope_head_dim must be even"),
            (
                arch.o_groups > 0 and arch.heads % arch.o_groups == 0,
                "o_groups must divide num_attention_heads",
            ),
            (
                arch.index_dim > 0 and arch.index_dim & (arch.index_dim - 1) == 0,
                "index_head_dim must be a power of two",
            ),
            (
                0 < arch.experts_per_token <= arch.experts,
                "num_experts_per_tok must lie within n_routed_experts",
            ),
            (0 <= arch.hash_layers <= arch.layers, "num_hash_layers exceeds the layers"),
        )
        if not ok
    ]
    if wrong:
        raise ModelError(f"{where}: {'; '.join(wrong)}.", "Fix the file.", code="bad_config")
