"""DeepSeek-V4's config.json, in the publisher's spelling or Hugging Face's. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from metainfer.core.errors import ModelError
from metainfer.models.common.config import ConfigReader, token_ids
from metainfer.models.deepseek_v4.arch import FAMILY, DeepSeekV4Arch, LayerKind, Yarn

_KINDS = {0: LayerKind.WINDOW, 4: LayerKind.CSA, 128: LayerKind.HCA}
_TYPES = {
    "sliding_attention": LayerKind.WINDOW,
    "compressed_sparse_attention": LayerKind.CSA,
    "heavily_compressed_attention": LayerKind.HCA,
}
_RATES = ("compressed_sparse_attention", "heavily_compressed_attention")


def read_arch(config: Mapping[str, object], where: str = "config.json") -> DeepSeekV4Arch:
    """Read the config of DeepSeek-V4-Flash (April, DSpark and 0731 files), or of a model that
    `transformers` saved.

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
    csa, hca = _rates(reader, where)
    head_dim = reader.required("head_dim", int)
    theta, compress_theta, yarn = _rope(reader, where)
    arch = DeepSeekV4Arch(
        layers=layers,
        vocab_size=reader.required("vocab_size", int),
        hidden=reader.required("hidden_size", int),
        heads=reader.required("num_attention_heads", int),
        head_dim=head_dim,
        rope_dim=_rope_dim(reader, head_dim, where),
        q_rank=reader.required("q_lora_rank", int),
        o_groups=reader.required("o_groups", int),
        o_rank=reader.required("o_lora_rank", int),
        window=reader.required("sliding_window", int),
        kinds=_kinds(reader, layers, where),
        csa=csa,
        hca=hca,
        theta=theta,
        compress_theta=compress_theta,
        yarn=yarn,
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
        hash_layers=_hash_layers(reader, layers, where),
        limit=reader.required("swiglu_limit", float),
        draft_layers=drafts,
        dspark_block=block,
        eos_token_ids=token_ids(config, "eos_token_id"),
    )
    reader.finish()
    _check(arch, where)
    return arch


def _fixed(reader: ConfigReader) -> None:
    """Keys with one meaning that is built, and keys of training."""
    reader.only("num_key_value_heads", (1,))
    reader.only("n_shared_experts", (1,))
    reader.only("scoring_func", ("sqrtsoftplus",))
    reader.only("topk_method", ("noaux_tc",))
    reader.only("norm_topk_prob", (True,))
    reader.only("hidden_act", ("silu",))
    reader.only("attention_bias", (False,))
    reader.only("mlp_bias", (False,))
    reader.only("tie_word_embeddings", (False,))
    reader.only("expert_dtype", ("fp4", "fp8"))
    reader.only("n_group", (1,))
    reader.only("topk_group", (1,))
    for key in ("router_aux_loss_coef", "router_jitter_noise"):
        reader.optional(key, float, 0.0)
    reader.optional("output_router_logits", bool, False)


def _rates(reader: ConfigReader, where: str) -> tuple[int, int]:
    """Tokens of one entry in CSA and HCA layers."""
    csa = reader.optional("compress_rate_csa", int, 4)
    hca = reader.optional("compress_rate_hca", int, 128)
    table = reader.mapping("compress_rates")
    if table is None:
        return csa, hca
    inner = ConfigReader(table, "compress_rates")
    found = tuple(inner.required(key, int) for key in _RATES)
    inner.finish()
    for key, value in zip(("compress_rate_csa", "compress_rate_hca"), found, strict=True):
        _same(reader.optional(key, int, value), value, where, key, "compress_rates")
    return found[0], found[1]


def _kinds(reader: ConfigReader, layers: int, where: str) -> tuple[LayerKind, ...]:
    """Each layer's kind: ``compress_ratios`` (what follows the layers is the draft's: zeros), or
    ``layer_types``."""
    ratios, types = reader.sequence("compress_ratios"), reader.sequence("layer_types")
    if types is not None:
        if len(types) != layers or any(name not in list(_TYPES) for name in types):
            raise ModelError(
                f"{where} has layer_types = {types!r} for {layers} layers.",
                f"Expected one of {', '.join(_TYPES)} per layer.",
                code="bad_config",
            )
        named = tuple(_TYPES[str(name)] for name in types)
        if ratios is not None:
            _same(named, _by_ratio(ratios, layers, where), where, "layer_types", "compress_ratios")
        return named
    return _by_ratio(ratios, layers, where)


def _by_ratio(ratios: tuple[object, ...] | None, layers: int, where: str) -> tuple[LayerKind, ...]:
    if ratios is None or len(ratios) < layers or any(ratios[layers:]):
        raise ModelError(
            f"{where} has compress_ratios = {ratios!r} for {layers} layers.",
            "Expected one per layer, then zeros for the draft.",
            code="bad_config",
        )
    kinds = []
    for value in ratios[:layers]:
        if isinstance(value, bool) or not isinstance(value, int) or value not in _KINDS:
            raise ModelError(
                f"{where} has {value!r} in compress_ratios, which is not supported.",
                f"Supported: {', '.join(map(str, _KINDS))}.",
                code="unsupported_config",
            )
        kinds.append(_KINDS[value])
    return tuple(kinds)


def _hash_layers(reader: ConfigReader, layers: int, where: str) -> int:
    """Leading layers that route by token id."""
    types = reader.sequence("mlp_layer_types")
    if types is None:
        return reader.required("num_hash_layers", int)
    count = types.count("hash_moe")
    _same(
        reader.optional("num_hash_layers", int, count), count, where, "num_hash_layers",
        "mlp_layer_types",
    )  # fmt: skip
    if types != ("hash_moe",) * count + ("moe",) * (layers - count):
        raise ModelError(
            f"{where} has mlp_layer_types = {types!r}.",
            f"Expected hash_moe layers, then moe layers, {layers} in all.",
            code="unsupported_config",
        )
    return count


def _rope_dim(reader: ConfigReader, head_dim: int, where: str) -> int:
    part = reader.optional("partial_rotary_factor", float, 0.0)
    if not 0 <= part <= 1:  # NaN too
        raise ModelError(
            f"{where} has partial_rotary_factor = {part}.",
            "It is a part of one: 0 to 1.",
            code="bad_config",
        )
    if not part:
        return reader.required("qk_rope_head_dim", int)
    width = reader.optional("qk_rope_head_dim", int, int(head_dim * part))
    near = abs(width - head_dim * part) < 1
    _same(near, True, where, "qk_rope_head_dim", "partial_rotary_factor")
    return width


def _rope(reader: ConfigReader, where: str) -> tuple[float, float, Yarn | None]:
    """Base of plain layers, base and extension of those that compress."""
    table = reader.mapping("rope_scaling")
    newer = reader.mapping("rope_parameters")
    if newer is not None and "compress" in newer:
        inner = ConfigReader(newer, f"{where}'s rope_parameters")
        main, compress = inner.mapping("main"), inner.mapping("compress")
        inner.optional("rope_type", str, "")
        inner.finish()
        if main is None or compress is None:
            raise ModelError(
                f"{where}'s rope_parameters lack main or compress.",
                "Use the publisher's config.json.",
            )
        plain = ConfigReader(main, f"{where}'s rope_parameters.main")
        plain.only("rope_type", ("default",))
        plain.optional("partial_rotary_factor", float, 0.0)
        theta = plain.required("rope_theta", float)
        plain.finish()
        compress_theta, yarn = _extension(compress, f"{where}'s rope_parameters.compress")
        said = "rope_parameters"
        _same(reader.optional("rope_theta", float, theta), theta, where, "rope_theta", said)
        other = reader.optional("compress_rope_theta", float, compress_theta)
        _same(other, compress_theta, where, "compress_rope_theta", said)
        if table is not None:
            older = _extension(table, f"{where}'s rope_scaling")[1]
            _same(older, yarn, where, "rope_scaling", said)
        return theta, compress_theta, yarn
    theta = reader.required("rope_theta", float)
    compress_theta = reader.required("compress_rope_theta", float)
    found = [
        _extension(each, f"{where}'s {key}")[1]
        for key, each in (("rope_parameters", newer), ("rope_scaling", table))
        if each
    ]
    if not found:
        raise ModelError(f"{where} has no rope_scaling.", "Expected YaRN's.", code="bad_config")
    _same(found[0], found[-1], where, "rope_parameters", "rope_scaling")
    return theta, compress_theta, found[0]


def _extension(table: Mapping[str, object], where: str) -> tuple[float, Yarn | None]:
    """``rope_theta`` (0 where the table has none) and YaRN's numbers."""
    inner = ConfigReader(table, where)
    for key in ("type", "rope_type"):
        inner.only(key, ("yarn", "default"))
    inner.only("attention_factor", (1.0, 1))
    inner.optional("partial_rotary_factor", float, 0.0)
    theta = inner.optional("rope_theta", float, 0.0)
    if "default" in (table.get("type"), table.get("rope_type")):
        inner.finish()
        return theta, None
    yarn = Yarn(
        factor=inner.required("factor", float),
        beta_fast=inner.required("beta_fast", float),
        beta_slow=inner.required("beta_slow", float),
        original=inner.required("original_max_position_embeddings", int),
    )
    inner.finish()
    return theta, yarn


def _same(one: object, other: object, where: str, first: str, second: str) -> None:
    """Two keys that say one thing say the same."""
    if one != other:
        raise ModelError(
            f"{where}: {first} and {second} contradict each other.",
            "The file is damaged or was edited; fetch the checkpoint again.",
            code="bad_config",
        )


_POSITIVE = {
    "num_hidden_layers": "layers", "vocab_size": "vocab_size", "hidden_size": "hidden",
    "num_attention_heads": "heads", "q_lora_rank": "q_rank", "o_groups": "o_groups",
    "o_lora_rank": "o_rank", "sliding_window": "window", "index_n_heads": "index_heads",
    "max_position_embeddings": "max_context", "index_topk": "index_topk", "hc_mult": "streams",
    "hc_sinkhorn_iters": "sinkhorn_iters", "hc_eps": "hyper_eps", "rms_norm_eps": "norm_eps",
    "moe_intermediate_size": "ffn", "routed_scaling_factor": "routed_scale",
}  # fmt: skip
"""Keys whose numbers must be above zero (and finite), and where the arch holds them."""


def _check(arch: DeepSeekV4Arch, where: str) -> None:
    """Numbers that must fit each other."""
    yarn = arch.yarn or Yarn(factor=1.0, beta_fast=1.0, beta_slow=1.0, original=1)
    wrong = [
        text
        for ok, text in (
            *(
                (0 < getattr(arch, name) < math.inf, f"{key} must be above zero")
                for key, name in _POSITIVE.items()
            ),
            (0 <= arch.limit < math.inf, "swiglu_limit must be zero or more"),
            (min(arch.draft_layers, arch.dspark_block) >= 0, "a draft has no negative size"),
            (
                all(1 < theta < math.inf for theta in (arch.theta, arch.compress_theta)),
                "a rotary base must be above one",
            ),
            (
                all(0 < n < math.inf for n in (yarn.factor, yarn.beta_fast, yarn.beta_slow))
                and yarn.original > 0,
                "YaRN's numbers must be above zero",
            ),
            (0 < arch.rope_dim < arch.head_dim, "qk_rope_head_dim must lie below head_dim"),
            (arch.rope_dim % 2 == 0, "qk_rope_head_dim must be even"),
            (arch.rope_dim <= arch.index_dim, "index_head_dim must hold qk_rope_head_dim"),
            (0 < arch.csa < arch.hca, "the ratio of CSA must lie below that of HCA"),
            (
                arch.o_groups <= 0 or arch.heads % arch.o_groups == 0,
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
