"""Shapes for ``random:`` references: real ones for machines, tiny ones for any laptop."""

from __future__ import annotations

_TINY: dict[str, object] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 0,
}


def random_configs() -> dict[str, dict[str, object]]:
    """Name -> Hugging Face config, without weights."""
    return {
        "tiny-llama": {**_TINY, "model_type": "llama", "tie_word_embeddings": False},
        "tiny-mistral": {**_TINY, "model_type": "mistral", "sliding_window": 24},
        "tiny-qwen2": {**_TINY, "model_type": "qwen2", "tie_word_embeddings": True},
        "tiny-qwen3": {**_TINY, "model_type": "qwen3", "tie_word_embeddings": True},
        "qwen3-8b": {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": 151645,
        },
    }
