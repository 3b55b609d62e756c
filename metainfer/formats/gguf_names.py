"""GGUF to Hugging Face: tensor names, config keys, and which rows llama.cpp permuted. No torch.

Source: llama.cpp's `gguf-py/gguf/tensor_mapping.py` and `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from typing import Any

from metainfer.core.errors import ModelError
from metainfer.formats.gguf_header import GgufHeader
from metainfer.formats.index import TensorInfo

#: GGUF architecture -> (Hugging Face class, model_type, q/k rows permuted by the converter).
ARCHITECTURES: Mapping[str, tuple[str, str, bool]] = {
    "llama": ("LlamaForCausalLM", "llama", True),
    "mistral": ("MistralForCausalLM", "mistral", True),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", False),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", False),
}

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_PERMUTED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(?:weight|bias)")


def hugging_face_name(name: str, architecture: str) -> str:
    """The Hugging Face name of GGUF tensor `name`; `ModelError` when there is none."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"
    raise ModelError(
        f"GGUF tensor {name!r} ({architecture}) has no place in a dense {architecture} model.",
        "Use the publisher's safetensors folder for this model.",
        code="unsupported_tensor",
    )


def _check_supported(header: GgufHeader) -> str:
    architecture = header.architecture
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {architecture!r} is not supported.",
            f"Supported: {', '.join(ARCHITECTURES)}. "
            "For other models pass the publisher's safetensors folder.",
            code="unsupported_architecture",
        )
    split = header.metadata.get("split.count", 0)
    if isinstance(split, int) and split > 1:
        raise ModelError(
            f"{header.path.name} is one of {split} parts of a split GGUF.",
            "Join the parts with `llama-gguf-split --merge` and pass the result.",
            code="split_gguf",
        )
    return architecture


def hugging_face_tensors(header: GgufHeader) -> dict[str, TensorInfo]:
    """The header's tensors under Hugging Face names."""
    architecture = _check_supported(header)
    result = {}
    for info in header.tensors.values():
        name = hugging_face_name(info.name, architecture)
        result[name] = TensorInfo(
            name, info.scheme, info.shape, info.nbytes, info.file, info.offset
        )
    return result


def permuted_heads(name: str, metadata: Mapping[str, Any]) -> int:
    """Heads whose rows llama.cpp interleaved in tensor `name` (a Hugging Face name), or 0."""
    architecture = metadata.get("general.architecture", "")
    if architecture not in ARCHITECTURES or not ARCHITECTURES[architecture][2]:
        return 0
    match = _PERMUTED.fullmatch(name)
    if match is None:
        return 0
    heads = _integer(metadata, f"{architecture}.attention.head_count")
    if match[1] == "q":
        return heads
    return _integer(metadata, f"{architecture}.attention.head_count_kv", heads)


def _integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        shown = "absent" if value is None else str(value)[:60]
        raise ModelError(
            f"GGUF key {key} is {shown}, not one positive whole number.",
            "Convert the model again with a current llama.cpp.",
            code="bad_metadata",
        )
    return value


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32 (GGUF stores 1e-5 as 9.9999997e-06)."""
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        try:
            if struct.pack("<f", float(text)) == struct.pack("<f", value):
                return float(text)
        except OverflowError:
            break
    return value


def _real(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(
            f"GGUF key {key} is {'absent' if value is None else value!r}, not a number.",
            "Convert the model again with a current llama.cpp.",
            code="bad_metadata",
        )
    return _shortest(float(value))


def hugging_face_config(header: GgufHeader) -> dict[str, Any]:
    """A ``config.json`` with the keys Hugging Face uses, from GGUF metadata."""
    architecture = _check_supported(header)
    metadata, prefix = header.metadata, architecture
    class_name, model_type, _ = ARCHITECTURES[architecture]
    hidden = _integer(metadata, f"{prefix}.embedding_length")
    heads = _integer(metadata, f"{prefix}.attention.head_count")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(
            f"{header.path.name} has no token embedding matrix.",
            "Pass a file that holds a whole language model.",
            code="missing_tensor",
        )
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": _integer(metadata, f"{prefix}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(metadata, f"{prefix}.attention.head_count_kv", heads),
        "head_dim": _integer(metadata, f"{prefix}.attention.key_length", hidden // heads),
        "intermediate_size": _integer(metadata, f"{prefix}.feed_forward_length"),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": _integer(metadata, f"{prefix}.context_length"),
        "rope_theta": _real(metadata, f"{prefix}.rope.freq_base", 10000.0),
        "rms_norm_eps": _real(metadata, f"{prefix}.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    for key in ("bos", "eos", "padding"):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(value, int):
            config[f"{'pad' if key == 'padding' else key}_token_id"] = value
    window = metadata.get(f"{prefix}.attention.sliding_window")
    if isinstance(window, int) and window > 0:
        config["sliding_window"] = window
    scaling = _rope_scaling(header, prefix)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(header: GgufHeader, prefix: str) -> dict[str, Any] | None:
    """Rope scaling in Hugging Face words. Factors kept as a tensor are named, never dropped."""
    metadata = header.metadata
    if "rope_freqs.weight" in header.tensors:
        theta = _real(metadata, f"{prefix}.rope.freq_base", 10000.0)
        found = _llama3_scaling(_read_floats(header.tensors["rope_freqs.weight"]), theta)
        return found or {"rope_type": "gguf_factors", "tensor": "rope_freqs.weight"}
    kind = metadata.get(f"{prefix}.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind}
    if f"{prefix}.rope.scaling.factor" in metadata:
        scaling["factor"] = _real(metadata, f"{prefix}.rope.scaling.factor")
    original = metadata.get(f"{prefix}.rope.scaling.original_context_length")
    if isinstance(original, int):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _read_floats(info: TensorInfo) -> tuple[float, ...]:
    """The numbers of a small F32 tensor; none for another scheme or a large one."""
    if info.scheme != "F32" or info.nbytes > 4096:
        return ()
    with info.file.open("rb") as stream:
        stream.seek(info.offset)
        raw = stream.read(info.nbytes)
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def _llama3_scaling(factors: tuple[float, ...], theta: float) -> dict[str, Any] | None:
    """Llama 3's scaling when it gives exactly these factors, else None.

    llama.cpp's converter stores, per frequency, by how much it is slowed down; Llama 3.1 to 3.3
    all have low 1, high 4 and 8192 original positions, and differ in the largest factor.
    """
    low, high, original = 1.0, 4.0, 8192
    largest = max(factors, default=0.0)
    if not 1.0 < largest < 1e6:
        return None
    for place, stored in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (place / len(factors))
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        expected = 1 / ((1 - smooth) / largest + smooth)
        if not math.isclose(stored, expected, rel_tol=1e-5):
            return None
    return {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
