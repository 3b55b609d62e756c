"""Shapes behind ``random:`` references: the published ones, and tiny ones.

GLM-5.2 and 5.3 have one geometry and differ in how their files store it: 5.3 in FP8 blocks, the
5.2 of NVIDIA with routed experts in NVFP4 and all else in BF16. ``glm-5.3-nvfp4`` is the first with
the experts of the second.
"""

from __future__ import annotations

_COMMON: dict[str, object] = {
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}
_BLOCKS: dict[str, object] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

_V32: dict[str, object] = {
    **_COMMON,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "index_n_heads": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": {**_BLOCKS, "scale_fmt": "ue8m0"},
}

_GLM: dict[str, object] = {
    **_COMMON,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "indexer_rope_interleave": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
}

_TINY: dict[str, object] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "index_topk": 8,
    "index_head_dim": 32,
    "index_n_heads": 16,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def random_configs() -> dict[str, dict[str, object]]:
    """Name -> config in the published spelling."""
    experts = {"expert_dtype": "nvfp4"}
    tiny_glm = {**_GLM, **_TINY, "num_hidden_layers": 7}
    tiny_v32 = {**_V32, **_TINY, "num_hidden_layers": 3, "n_group": 4, "topk_group": 2}
    del tiny_v32["quantization_config"]
    return {
        "deepseek-v3.2": dict(_V32),
        "glm-5.3": {**_GLM, "quantization_config": dict(_BLOCKS)},
        "glm-5.3-nvfp4": {**_GLM, "quantization_config": {**_BLOCKS, **experts}},
        "glm-5.2-nvfp4": {**_GLM, "quantization_config": experts},
        "tiny-glm-5.3": tiny_glm,
        "tiny-deepseek-v3.2": tiny_v32,
    }
