"""config.json of DeepSeek-V3.2 and GLM-5, 5.1, 5.2, 5.3. No torch.

Which layers have an indexer: ``indexer_types``; else ``index_topk_pattern``; else every
``index_topk_freq``-th layer counted from ``index_skip_topk_offset``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from metainfer.core.errors import ModelError
from metainfer.models.common.config import ConfigReader, token_ids
from metainfer.models.common.rope import read_rope
from metainfer.models.dsa.arch import DsaArch

_SPARSE = ("indexed_attention", "deepseek_sparse_attention")
V32, GLM = FAMILIES = ("deepseek_v32", "glm_moe_dsa")

_HARMLESS = frozenset(
    {
        "aux_loss_alpha", "ep_size", "head_dim", "index_share_for_mtp_iteration",
        "moe_router_dtype", "num_experts", "num_key_value_heads", "num_local_experts",
        "qk_head_dim", "rope_interleave", "seq_aux",
    }
)  # fmt: skip
"""Keys of training, of how drafts are run, or that follow from others (there is one latent head,
whatever the number of KV heads says)."""


def read_arch(config: Mapping[str, object], where: str = "config.json") -> DsaArch:
    """Read a config of one of `FAMILIES`, as published or as `transformers` saves it.

    Raises:
        ModelError: a missing, unsupported or unknown key, naming it.
    """
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise ModelError(
            f"{where} has model_type {family!r}.",
            f"Expected {' or '.join(FAMILIES)}.",
            code="unsupported_model",
        )
    told = {key: value for key, value in config.items() if key not in _HARMLESS}
    reader = ConfigReader(told, where)
    _fixed(reader, family)
    layers = reader.required("num_hidden_layers", int)
    rope_dim = reader.required("qk_rope_head_dim", int)
    max_context = reader.required("max_position_embeddings", int)
    arch = DsaArch(
        family=family,
        layers=layers,
        vocab_size=reader.required("vocab_size", int),
        hidden=reader.required("hidden_size", int),
        heads=reader.required("num_attention_heads", int),
        q_rank=reader.required("q_lora_rank", int),
        kv_rank=reader.required("kv_lora_rank", int),
        nope=reader.required("qk_nope_head_dim", int),
        rope_dim=rope_dim,
        v_dim=reader.required("v_head_dim", int),
        rope=read_rope(reader, head_dim=rope_dim, max_positions=max_context),
        index_heads=reader.required("index_n_heads", int),
        index_dim=reader.required("index_head_dim", int),
        index_topk=reader.required("index_topk", int),
        index_interleaved=family == GLM,
        full=_full(reader, layers, where),
        max_context=max_context,
        norm_eps=reader.required("rms_norm_eps", float),
        dense_layers=_dense_layers(reader, layers, where),
        dense_ffn=reader.required("intermediate_size", int),
        ffn=reader.required("moe_intermediate_size", int),
        experts=reader.required("n_routed_experts", int),
        experts_per_token=reader.required("num_experts_per_tok", int),
        shared_experts=reader.required("n_shared_experts", int),
        groups=reader.optional("n_group", int, 1),
        groups_per_token=reader.optional("topk_group", int, 1),
        routed_scale=reader.required("routed_scaling_factor", float),
        draft_layers=reader.optional("num_nextn_predict_layers", int, 0),
        eos_token_ids=token_ids(config, "eos_token_id"),
    )
    reader.finish()
    _check(arch, where)
    return arch


def _fixed(reader: ConfigReader, family: str) -> None:
    """Keys with one meaning that is planned for."""
    reader.only("scoring_func", ("sigmoid",))
    reader.only("topk_method", ("noaux_tc",))
    reader.only("norm_topk_prob", (True,))
    reader.only("hidden_act", ("silu",))
    reader.only("attention_bias", (False,))
    reader.only("mlp_bias", (False,))
    reader.only("tie_word_embeddings", (False,))
    reader.only("moe_layer_freq", (1,))
    reader.only("output_router_logits", (False,))
    for name in reader.sequence("layer_types") or ():
        if name not in _SPARSE:
            raise ModelError(
                f"the config has a layer of type {name!r}.",
                f"Planned for: {', '.join(_SPARSE)}.",
                code="unsupported_config",
            )
    reader.only("indexer_rope_interleave", (family == GLM,))


def _full(reader: ConfigReader, layers: int, where: str) -> tuple[bool, ...]:
    """Per layer, whether it has an indexer of its own."""
    types = reader.sequence("indexer_types")
    pattern = reader.optional("index_topk_pattern", str, "")
    freq = max(reader.optional("index_topk_freq", int, 1), 1)
    offset = reader.optional("index_skip_topk_offset", int, 2)
    if types is not None:
        named = tuple(types)
    elif pattern:
        named = tuple({"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern)
    else:
        apart = (max(layer - offset + 1, 0) % freq for layer in range(layers))
        named = tuple("shared" if each else "full" for each in apart)
    if len(named) != layers or not set(named) <= {"full", "shared"} or named[:1] != ("full",):
        raise ModelError(
            f"{where} says of indexers {named!r} for {layers} layers.",
            "Expected full or shared for each layer, full for the first.",
            code="bad_config",
        )
    return tuple(name == "full" for name in named)


def _dense_layers(reader: ConfigReader, layers: int, where: str) -> int:
    """Leading layers without experts."""
    count = reader.optional("first_k_dense_replace", int, 3)
    types = reader.sequence("mlp_layer_types")
    if types is not None:
        count = types.count("dense")
        if types != ("dense",) * count + ("sparse",) * (layers - count):
            raise ModelError(
                f"{where} has mlp_layer_types = {types!r}.",
                f"Expected dense layers, then sparse ones, {layers} in all.",
                code="unsupported_config",
            )
    return min(count, layers)


_POSITIVE = (
    "layers", "vocab_size", "hidden", "heads", "q_rank", "kv_rank", "nope", "v_dim", "index_heads",
    "index_dim", "index_topk", "max_context", "norm_eps", "dense_ffn", "ffn", "experts",
    "experts_per_token", "shared_experts", "groups", "groups_per_token", "routed_scale",
)  # fmt: skip


def _check(arch: DsaArch, where: str) -> None:
    """Numbers that must fit each other."""
    checks = (
        *((0 < getattr(arch, name) < math.inf, f"{name} must be above zero") for name in _POSITIVE),
        (arch.rope_dim > 0 and arch.rope_dim % 2 == 0, "qk_rope_head_dim must be even, above zero"),
        (arch.rope_dim <= arch.index_dim, "index_head_dim must hold qk_rope_head_dim"),
        (arch.dense_layers >= 0, "first_k_dense_replace must be zero or more"),
        (arch.draft_layers >= 0, "num_nextn_predict_layers must be zero or more"),
        (arch.experts_per_token <= arch.experts, "num_experts_per_tok exceeds n_routed_experts"),
        (
            arch.groups <= 0 or (arch.experts % arch.groups == 0),
            "n_group must divide n_routed_experts",
        ),
        (arch.groups_per_token <= arch.groups, "topk_group exceeds n_group"),
    )
    wrong = [text for ok, text in checks if not ok]
    if wrong:
        raise ModelError(f"{where}: {'; '.join(wrong)}.", "Fix the file.", code="bad_config")
