"""Reading tensors: exact bytes, file order, row order of GGUF attention put back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from metainfer.core.errors import ModelError
from metainfer.formats.checkpoint import Checkpoint, unpermute_rows
from metainfer.formats.quant import dequantise

Write = Callable[..., Path]


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k rows of Llama models."""
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("width", [2, 6, 64])
def test_row_order_is_the_converters_inverse(heads: int, width: int) -> None:
    original = np.arange(heads * width * 3).reshape(heads * width, 3)
    back = unpermute_rows(torch.from_numpy(permute(original, heads).copy()), heads)
    assert np.array_equal(back.numpy(), original)
    bias = unpermute_rows(torch.from_numpy(permute(original[:, 0], heads).copy()), heads)
    assert np.array_equal(bias.numpy(), original[:, 0])


def test_rows_that_heads_cannot_share_are_refused() -> None:
    with pytest.raises(ModelError, match="12 rows"):
        unpermute_rows(torch.zeros(12, 1), 4)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gguf_equals_the_library_up_to_row_order(gguf_file: Write, arch: str) -> None:
    path = gguf_file(arch)
    checkpoint = Checkpoint.open(path)
    reader = {t.name: t for t in gguf.GGUFReader(path).tensors}

    def stored(name: str) -> torch.Tensor:
        tensor = reader[name]
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())

    layer, block = "model.layers.1.self_attn", "blk.1"
    for kind in ("weight", "bias"):
        for part, heads in (("q", 4), ("k", 2)):
            ours = dequantise(checkpoint.read(f"{layer}.{part}_proj.{kind}"))
            theirs = stored(f"{block}.attn_{part}.{kind}")
            if arch == "llama":
                assert not torch.equal(ours, theirs)
                theirs = unpermute_rows(theirs, heads)
            assert torch.equal(ours, theirs)
        assert torch.equal(
            dequantise(checkpoint.read(f"{layer}.v_proj.{kind}")),
            stored(f"{block}.attn_v.{kind}"),
        )
    embedding = checkpoint.read("model.embed_tokens.weight")
    assert embedding.scheme == "Q8_0" and embedding.data.shape == (50, 68)
    assert torch.equal(dequantise(embedding), stored("token_embd.weight"))


def test_safetensors_are_read_exactly(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "half": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "fp8": torch.randn(2, 2, generator=generator).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    for name, expected in tensors.items():
        data = checkpoint.read(name).data
        assert data.dtype == expected.dtype and data.shape == expected.shape
        assert torch.equal(
            data.view(torch.uint8) if data.ndim else data,
            expected.view(torch.uint8) if data.ndim else expected,
        )


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    for pad in range(4):
        header = {
            "pad": {"dtype": "U8", "shape": [pad], "data_offsets": [0, pad]},
            "x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [pad, pad + 16]},
        }
        raw = json.dumps(header).encode()
        body = len(raw).to_bytes(8, "little") + raw + b"\1" * pad + values.tobytes()
        (tmp_path / "model.safetensors").write_bytes(body)
        data = Checkpoint.open(tmp_path).read("x").data
        assert data.data_ptr() % 4 == 0
        assert data.flatten().tolist() == [0, 1, 2, 3]


def test_iteration_is_in_file_order_once_each_with_progress(tmp_path: Path) -> None:
    save_file({"b": torch.ones(3), "a": torch.zeros(2)}, tmp_path / "m-2.safetensors")
    save_file({"c": torch.ones(5)}, tmp_path / "m-1.safetensors")
    places = {"a": "m-2.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    checkpoint = Checkpoint.open(tmp_path)
    seen: list[tuple[int, int]] = []
    names = [n for n, _ in checkpoint.iter_tensors(progress=lambda *at: seen.append(at))]
    infos = [checkpoint.index[n] for n in names]
    assert names[0] == "c" and sorted(names) == ["a", "b", "c"]
    assert infos[1].offset < infos[2].offset
    assert [total for _, total in seen] == [40, 40, 40]
    assert [done for done, _ in seen] == [20, 20 + infos[1].nbytes, 40]
    assert [n for n, _ in checkpoint.iter_tensors(["a", "c", "a"])] == ["c", "a"]
    with pytest.raises(ModelError, match="no tensor 'z'"):
        list(checkpoint.iter_tensors(["z"]))
    assert list(checkpoint.iter_tensors([])) == []


def test_tensors_are_views_and_writes_stay_private(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(4)}, path)
    before = path.read_bytes()
    checkpoint = Checkpoint.open(tmp_path)
    offset = checkpoint.index["x"].offset
    data = checkpoint.read("x").data
    with path.open("r+b") as stream:  # a view of the page cache sees this, a copy does not
        stream.seek(offset)
        stream.write(np.float32(7).tobytes())
    assert data[0] == 7
    data[1] = 9
    assert path.read_bytes()[offset + 4 :] == before[offset + 4 :]
    checkpoint.close()
    assert data.tolist() == [7, 9, 0, 0]


def test_a_file_that_shrinks_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(4)}, path)
    checkpoint = Checkpoint.open(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match="became shorter"):
        checkpoint.read("x")
    path.unlink()
    with pytest.raises(ModelError, match="Cannot read"):
        Checkpoint(checkpoint.index).read("x")


def test_schemes_without_a_dtype_are_refused_at_reading(tmp_path: Path) -> None:
    header = {"x": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0\0")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.index["x"].nbytes == 2
    with pytest.raises(ModelError, match="scheme F4"):
        checkpoint.read("x")
