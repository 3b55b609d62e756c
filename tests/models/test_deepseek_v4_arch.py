"""DeepSeek-V4-Flash: its config, its layer mix, and the bytes of its caches as published tables."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from metainfer.core.errors import ModelError, UsageError
from metainfer.kv.book.spec import CacheSpec, GroupKind, Rewind, form_groups
from metainfer.models.deepseek_v4.arch import LayerKind
from metainfer.models.deepseek_v4.caches import page_unit
from metainfer.models.deepseek_v4.config import read_arch

MILLION = 1_048_576


def released(**changes: Any) -> dict[str, Any]:
    """The April file, key by key."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": MILLION,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "num_hash_layers": 3,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not ...}


def test_layer_mix() -> None:
    arch = read_arch(released())
    assert [arch.count(kind) for kind in LayerKind] == [2, 21, 20]
    assert arch.ratio(2) == arch.ratio(42) == 4 and arch.ratio(3) == arch.ratio(41) == 128
    assert arch.scale == 512**-0.5 and arch.eos_token_ids == (1,)
    assert arch.yarn is not None
    assert (arch.yarn.factor, arch.yarn.original, arch.draft_layers) == (16.0, 65536, 1)


def caches(latent: str, index: str, dtype: str = "bfloat16") -> tuple[CacheSpec, ...]:
    return read_arch(released()).cache_specs(dtype, {"kv": latent, "index": index})


def bytes_per_token(specs: tuple[CacheSpec, ...]) -> Fraction:
    """What one more token costs in the long run: entries over their ratios, without windows."""
    paged = (spec for spec in specs if spec.kind is GroupKind.PAGED)
    return sum((Fraction(spec.form.bytes, spec.tokens_per_entry) for spec in paged), Fraction(0))


def bytes_per_sequence(specs: tuple[CacheSpec, ...]) -> tuple[int, int]:
    """What every long sequence holds whatever its length: window entries, and raw rows."""
    window = sum(spec.window * spec.form.bytes for spec in specs)
    return window, sum(spec.state_bytes for spec in specs)


@pytest.mark.parametrize(
    ("latent", "index", "per_token", "total"),
    [
        ("latent@1", "index@1", "6880", 7.220e9),
        ("latent-fp8@1", "index-fp8@1", "3850.25", 4.040e9),
        ("latent-fp8@1", "index-fp4@1", "3514.25", 3_688_172_544),
    ],
)
def test_bytes_are_those_of_the_tables(
    latent: str, index: str, per_token: str, total: float
) -> None:
    specs = caches(latent, index)
    assert bytes_per_token(specs) == Fraction(per_token)
    whole = bytes_per_token(specs) * MILLION + bytes_per_sequence(specs)[0]
    assert float(whole) == pytest.approx(total, abs=0 if isinstance(total, int) else 1e6)


def test_bytes_of_a_sequence() -> None:
    """Rings of 8 more rows than the windows need: what rejected drafts may overwrite."""
    window, rows = bytes_per_sequence(caches("latent-fp8@1", "index-fp8@1"))
    assert window == 43 * 128 * 584 == 3_214_336
    csa = 16 * 2 * (1024 + 256) * 4
    assert rows == 21 * csa + 20 * 136 * 2 * 512 * 4


def test_groups_of_the_book() -> None:
    specs = caches("latent-fp8@1", "index-fp4@1")
    groups = {group.name: group for group in form_groups(specs, page_tokens=256)}
    sizes = {
        name: (len(group.layers), group.page_tokens, group.page_entries, group.form.bytes)
        for name, group in groups.items()
        if group.kind is not GroupKind.STATE
    }
    assert sizes == {
        "local-window128": (43, 64, 64, 584),
        "entries-1of4": (21, 256, 64, 584),
        "entries-1of128": (20, 256, 2, 584),
        "index-1of4": (21, 256, 64, 68),
    }
    states = [group for group in groups.values() if group.kind is GroupKind.STATE]
    assert sorted((len(g.layers), g.rows, g.snapshot_rows, g.clean_tokens) for g in states) == [
        (20, 136, 0, 128),
        (21, 16, 4, 0),
        (21, 16, 4, 0),
    ]
    assert {(g.rewind, g.ring_tokens) for g in states} == {(Rewind.CURSOR, 8)}
    assert {bool(group.snapshot_tokens) for group in states} == {True, False}
    assert page_unit(read_arch(released())) == 128


def test_rows_are_as_wide_as_the_model() -> None:
    stored = {spec.form.stored for spec in caches("latent@1", "index@1", "float64")}
    assert stored == {"float64"}


@pytest.mark.parametrize("key", sorted(set(released()) - {
    "architectures", "model_type", "num_key_value_heads", "n_shared_experts", "scoring_func",
    "topk_method", "norm_topk_prob", "hidden_act", "num_nextn_predict_layers",
    "tie_word_embeddings", "attention_bias", "attention_dropout", "initializer_range",
    "use_cache", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id",
}))  # fmt: skip
def test_what_shapes_the_model_is_required(key: str) -> None:
    with pytest.raises(ModelError, match=key):
        read_arch(released(**{key: ...}))


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "deepseek_v3"},
        {"num_key_value_heads": 2},
        {"scoring_func": "sigmoid"},
        {"norm_topk_prob": False},
        {"n_group": 8},
        {"engram_layer_ids": [1]},
        {"compress_ratios": [0] * 42},
        {"compress_ratios": [2] * 43},
        {"compress_ratios": [4] * 44},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {**released()["rope_scaling"], "mscale": 1.0}},
        {"qk_rope_head_dim": 512},
        {"o_groups": 7},
        {"index_head_dim": 96},
        {"num_experts_per_tok": 257},
        {"hidden_size": "4096"},
        {"sliding_window": 0},
        {"vocab_size": -1},
        {"hc_sinkhorn_iters": 0},
        {"index_topk": 0},
        {"o_groups": 0},
        {"rms_norm_eps": float("nan")},
        {"routed_scaling_factor": float("inf")},
        {"swiglu_limit": -1.0},
        {"rope_theta": 0},
        {"compress_rope_theta": float("nan")},
        {"rope_scaling": {**released()["rope_scaling"], "factor": 0}},
        {"num_nextn_predict_layers": -1},
        {"partial_rotary_factor": float("nan")},
        {"layer_types": [["sliding_attention"]] * 43},
    ],
)
def test_what_is_not_built_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        read_arch(released(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["sliding_attention"] * 43},
        {"mlp_layer_types": ["moe"] * 43},
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {**released()["rope_scaling"], "factor": 4}},
        {
            "compress_rate_csa": 2,
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 128,
            },
        },
        {
            "rope_parameters": {
                "main": {"rope_theta": 5000.0},
                "compress": {**released()["rope_scaling"], "rope_theta": 160000},
            }
        },
    ],
)
def test_keys_that_contradict_each_other_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="contradict"):
        read_arch(released(**change))


def test_later_files_are_read() -> None:
    arch = read_arch(
        released(
            expert_dtype="fp4", pad_token_id=2, dspark_block_size=5, dspark_noise_token_id=128799,
            dspark_target_layer_ids=[40, 41, 42], dspark_markov_rank=256,
        )
    )  # fmt: skip
    assert arch.dspark_block == 5


def test_the_shared_experts_clamp_is_a_switch() -> None:
    arch = read_arch(released())
    assert arch.clamp_shared and arch.with_options({"clamp_shared": "on"}) == arch
    assert not arch.with_options({"clamp_shared": "off"}).clamp_shared
    for wrong in ({"clamp_shared": "maybe"}, {"clamp": "off"}):
        with pytest.raises(UsageError, match="clamp"):
            arch.with_options(wrong)
