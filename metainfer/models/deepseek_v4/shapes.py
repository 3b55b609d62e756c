"""DeepSeek-V4's shapes for ``random:`` references: the published one, and a tiny one."""

from __future__ import annotations

_COMMON: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

_FLASH: dict[str, object] = {
    **_COMMON,
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4],
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "expert_dtype": "fp4",
}

# Every kind of layer in six; 128 stands for a ratio of 16, which short prompts reach.
_TINY: dict[str, object] = {
    **_COMMON,
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "compress_ratios": [0, 0, 4, 128, 4, 128],
    "compress_rate_hca": 16,  # so that short prompts close such windows
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 4096,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
}

# The same kinds of layers, stored as the published files are: FP8 blocks, MXFP4 experts.
_TINY_FP4: dict[str, object] = {
    **_TINY,
    "hidden_size": 256,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "index_head_dim": 32,
    "moe_intermediate_size": 128,
    "quantization_config": _FLASH["quantization_config"],
    "expert_dtype": "fp4",
}


def random_configs() -> dict[str, dict[str, object]]:
    """Name -> config in the published spelling, without weights and without a draft."""
    return {
        "deepseek-v4-flash": dict(_FLASH),
        "tiny-deepseek-v4": dict(_TINY),
        "tiny-deepseek-v4-fp4": dict(_TINY_FP4),
    }


def with_layers(config: dict[str, object], layers: int) -> dict[str, object]:
    """`config` with the first `layers` layers; beyond its own, the mix of its last two goes on."""
    ratios = list(_ratios(config))
    while len(ratios) < layers:
        ratios.append(ratios[-2])
    hashed = config["num_hash_layers"]
    assert isinstance(hashed, int)
    return {
        **config,
        "num_hidden_layers": layers,
        "compress_ratios": ratios[:layers],
        "num_hash_layers": min(hashed, layers),
    }


def _ratios(config: dict[str, object]) -> list[int]:
    ratios = config["compress_ratios"]
    assert isinstance(ratios, list)
    return ratios
