"""GGUF headers: the same facts as the `gguf` library, Hugging Face names, no bad input escapes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metainfer.core.errors import ModelError
from metainfer.formats.gguf_header import read_header
from metainfer.formats.gguf_names import (
    ARCHITECTURES,
    hugging_face_config,
    hugging_face_name,
    permuted_heads,
)
from metainfer.formats.index import CheckpointIndex
from metainfer.formats.schemes import BLOCKS, GGML_TYPES, bytes_per_row, tensor_bytes

Write = Callable[..., Path]
FUZZ = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def test_agrees_with_the_library(gguf_file: Write) -> None:
    path = gguf_file("qwen3")
    header = read_header(path)
    reader = gguf.GGUFReader(path)
    assert len(header.tensors) == len(reader.tensors)
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.scheme, info.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)
        assert info.offset == tensor.data_offset
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert header.metadata[key] == field.contents()


def test_block_sizes_and_type_ids_are_the_librarys() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        assert GGML_TYPES[kind.value] == kind.name
        assert tensor_bytes(kind.name, (3, 2 * block)) == 6 * size
        if kind.name in BLOCKS:
            assert BLOCKS[kind.name] == (block, size)
    assert len(GGML_TYPES) == len(gguf.GGML_QUANT_SIZES)
    with pytest.raises(ModelError, match="whole number of 32"):
        bytes_per_row("Q8_0", 33)
    with pytest.raises(ModelError, match="not known"):
        bytes_per_row("Q3_X", 32)
    with pytest.raises(ModelError, match="at least one dimension"):
        tensor_bytes("Q8_0", ())


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_names_are_those_of_the_publishers(arch: str) -> None:
    kind = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(kind, 3)
    parts = ["input_layernorm", "post_attention_layernorm"]
    parts += [f"self_attn.{x}_proj" for x in "qkvo"]
    parts += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    parts += ["self_attn.q_norm", "self_attn.k_norm"] if arch == "qwen3" else []
    expected = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    expected += [f"model.layers.2.{part}.weight" for part in parts]
    expected += [f"model.layers.2.self_attn.{x}_proj.bias" for x in "qkv"]
    for name in expected:
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        assert hugging_face_name(stored, arch) == name


def test_config_has_hugging_face_keys(gguf_file: Write) -> None:
    config = hugging_face_config(read_header(gguf_file("qwen2", tokenizer__ggml__eos_token_id=2)))
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["model_type"] == "qwen2"
    expected = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 50,
        "max_position_embeddings": 128,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "hidden_act": "silu",
    }
    assert {key: config[key] for key in expected} == expected
    assert "sliding_window" not in config and "rope_scaling" not in config


def test_config_of_variants(gguf_file: Write) -> None:
    extra = {
        "llama__attention__key_length": 32,
        "llama__attention__sliding_window": 4096,
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__original_context_length": 64,
    }
    config = hugging_face_config(read_header(gguf_file("llama", tied=True, **extra)))
    assert config["tie_word_embeddings"] is True
    assert config["head_dim"] == 32 and config["sliding_window"] == 4096
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "original_max_position_embeddings": 64,
    }


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_factors(gguf_file: Write, factor: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # Their frequencies against the plain ones are what llama.cpp's converter stores.
    oracle = LlamaConfig(
        hidden_size=512, num_attention_heads=4, rope_parameters={**scaling, "rope_theta": 5e5}
    )
    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](oracle, "cpu")
    plain = np.float32(5e5) ** -(np.arange(0, 128, 2, dtype=np.float32) / np.float32(128))
    factors = plain / slowed.numpy()
    config = hugging_face_config(read_header(gguf_file("llama", rope_factors=factors)))
    assert config["rope_scaling"] == {**scaling, "factor": pytest.approx(factor, rel=1e-5)}
    factors[20] *= 1.01
    config = hugging_face_config(read_header(gguf_file("llama", rope_factors=factors)))
    assert config["rope_scaling"] == {"rope_type": "gguf_factors", "tensor": "rope_freqs.weight"}


@pytest.mark.parametrize("factors", [[1.0] * 8, [0.0], [float("nan")] * 8, [float("inf")] * 8, []])
def test_other_rope_factors_are_named_not_dropped(gguf_file: Write, factors: list[float]) -> None:
    config = hugging_face_config(read_header(gguf_file("llama", rope_factors=factors)))
    assert config["rope_scaling"]["rope_type"] == "gguf_factors"


def test_only_llama_style_rows_are_permuted(gguf_file: Write) -> None:
    q, k = "model.layers.1.self_attn.q_proj.bias", "model.layers.0.self_attn.k_proj.weight"
    llama = read_header(gguf_file("llama")).metadata
    assert (permuted_heads(q, llama), permuted_heads(k, llama)) == (4, 2)
    assert permuted_heads("model.layers.0.self_attn.v_proj.weight", llama) == 0
    qwen = read_header(gguf_file("qwen2")).metadata
    assert (permuted_heads(q, qwen), permuted_heads(k, qwen)) == (0, 0)
    assert [name for name, row in ARCHITECTURES.items() if row[2]] == ["llama", "mistral"]


def test_what_is_not_supported_is_refused_by_name(gguf_file: Write) -> None:
    with pytest.raises(ModelError, match="'gpt2' is not supported"):
        CheckpointIndex.open(gguf_file("gpt2"))
    with pytest.raises(ModelError, match="one of 3 parts"):
        CheckpointIndex.open(gguf_file("llama", split__count=3))
    with pytest.raises(ModelError, match="ffn_gate_exps"):
        hugging_face_name("blk.0.ffn_gate_exps.weight", "llama")
    with pytest.raises(ModelError, match=r"block_count is 0"):
        hugging_face_config(read_header(gguf_file("llama", block_count=0)))


@FUZZ
@given(share=st.floats(0, 1, exclude_max=True))
def test_every_truncation_is_refused(tmp_path: Path, gguf_bytes: bytes, share: float) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes[: int(len(gguf_bytes) * share)])
    with pytest.raises(ModelError):
        CheckpointIndex.open(path)


@FUZZ
@given(edits=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=6))
def test_damage_gives_our_error_or_an_index(
    tmp_path: Path, gguf_bytes: bytes, edits: list[tuple[int, int]]
) -> None:
    whole = bytearray(gguf_bytes)
    for place, value in edits:
        whole[place] = value
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(whole))
    try:
        index = CheckpointIndex.open(path)
        hugging_face_config(read_header(path))
    except ModelError as error:
        assert error.cause and error.remedy
    else:
        assert all(i.offset + i.nbytes <= len(whole) for i in index.tensors.values())


def head(version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "Cannot read|does not start"),
        (b"GGML" + b"\0" * 40, "does not start"),
        (head(1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (head(tensors=2**60), "claims"),
        (head(keys=1) + struct.pack("<Q", 2**62), "ends inside"),
        (head(keys=1) + text("k") + struct.pack("<I", 99), "type 99"),
        (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 2**40), "claims"),
        (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 4, 2**62), "ends inside"),
        (head(keys=1) + text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, "deep"),
        (head(keys=2) + (text("k") + struct.pack("<II", 4, 1)) * 2, "twice"),
        (
            head(keys=1) + text("general.alignment") + struct.pack("<II", 4, 3),
            "power of two",
        ),
        (head(tensors=1) + text("t") + struct.pack("<I", 99), "99 dimensions"),
        (head(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 4, 77, 0), "ggml type 77"),
        (head(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 4, 0, 0), "ends at byte"),
        (head(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 4, 0, 5), "aligned"),
        (head(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 33, 8, 0), "32-element"),
        (
            head(tensors=2)
            + b"".join(text(n) + struct.pack("<IQIQ", 1, 16, 0, 0) for n in "ab")
            + b"\0" * 256,
            "overlap",
        ),
        (head(), "general.architecture"),
    ],
)
def test_crafted_headers_are_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=words):
        CheckpointIndex.open(path)
