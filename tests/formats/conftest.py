"""Makers of small model files for the formats tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def write_safetensors(
    path: Path, header: Any, data: bytes = b"", length: int | None = None
) -> Path:
    """A safetensors file from its parts; `length` lets the length field lie."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + raw + data)
    return path


@pytest.fixture
def st_file(tmp_path: Path) -> Callable[..., Path]:
    """Write ``model.safetensors`` in a fresh folder."""

    def write(header: Any, data: bytes = b"", length: int | None = None) -> Path:
        return write_safetensors(tmp_path / "model.safetensors", header, data, length)

    return write


LLAMA_KEYS = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


def write_gguf(
    path: Path,
    arch: str = "llama",
    *,
    tied: bool = False,
    rope_factors: Any = None,
    **extra: Any,
) -> Path:
    """A two-layer GGUF model by the `gguf` library, weights from a fixed generator."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, arch)
    for key, value in LLAMA_KEYS.items():
        writer.add_uint32(f"{arch}.{key}", extra.pop(key, value))
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{arch}.rope.freq_base", 500000.0)
    for key, value in extra.items():
        if isinstance(value, int):
            writer.add_uint32(key.replace("__", "."), value)
        else:
            writer.add_string(key.replace("__", "."), value)
    random = np.random.default_rng(7)

    def add(name: str, *shape: int, kind: str | None = None) -> None:
        values = random.standard_normal(shape).astype(np.float32)
        if kind is None:
            writer.add_tensor(name, values)
        else:
            scheme = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(values, scheme), raw_dtype=scheme)

    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, dtype=np.float32))
    add("token_embd.weight", 50, 64, kind="Q8_0")
    add("output_norm.weight", 64)
    if not tied:
        add("output.weight", 50, 64, kind="Q4_0")
    for layer in range(2):
        block = f"blk.{layer}"
        add(f"{block}.attn_q.weight", 64, 64, kind="Q4_1")
        add(f"{block}.attn_k.weight", 32, 64, kind="Q4_0")
        add(f"{block}.attn_v.weight", 32, 64)
        add(f"{block}.attn_q.bias", 64)
        add(f"{block}.attn_k.bias", 32)
        add(f"{block}.attn_v.bias", 32)
        add(f"{block}.attn_output.weight", 64, 64, kind="Q8_0")
        add(f"{block}.attn_norm.weight", 64)
        add(f"{block}.ffn_norm.weight", 64)
        add(f"{block}.ffn_gate.weight", 96, 64)
        add(f"{block}.ffn_up.weight", 96, 64)
        add(f"{block}.ffn_down.weight", 64, 96)
        if arch == "qwen3":
            add(f"{block}.attn_q_norm.weight", 16)
            add(f"{block}.attn_k_norm.weight", 16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[..., Path]:
    """Write ``model.gguf`` in a fresh folder."""

    def write(arch: str = "llama", **kwargs: Any) -> Path:
        return write_gguf(tmp_path / "model.gguf", arch, **kwargs)

    return write


@pytest.fixture(scope="session")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of one sound GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()
