"""Safetensors headers: what the publisher's library writes is read, what lies is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metainfer.core.errors import ModelError
from metainfer.formats.index import CheckpointIndex

Write = Callable[..., Path]
F32_2 = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def test_agrees_with_the_library_on_every_dtype(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from metainfer.formats.quant import TORCH_DTYPES

    tensors = {
        scheme: torch.ones((3, 5), dtype=torch.float32).to(dtype)
        for scheme, dtype in TORCH_DTYPES.items()
        if scheme not in ("U16", "U32", "U64", "F8_E8M0")
    }
    tensors["scalar"] = torch.tensor(1.0)
    tensors["empty"] = torch.empty(0, 4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    index = CheckpointIndex.open(tmp_path)
    assert set(index.tensors) == set(tensors)
    assert index.metadata == {"format": "pt"} and index.container == "safetensors"
    for name, tensor in tensors.items():
        info = index[name]
        assert info.shape == tuple(tensor.shape)
        assert info.nbytes == tensor.numel() * tensor.element_size()
        if name not in ("scalar", "empty"):
            assert info.scheme == name
    assert index.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "needs 8 bytes"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}, "ends at byte"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "shape"),
        ({"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}, "shape"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, "shape"),
        ({"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}, "shape"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "needs 8 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}, "needs"),
        ({"dtype": "Q9_X", "shape": [2], "data_offsets": [0, 8]}, "'Q9_X'"),
        ({"dtype": "Q8_0", "shape": [32], "data_offsets": [0, 34]}, "'Q8_0'"),
        ({"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}, "not supported"),
        ({"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}, "whole bytes"),
        ([1, 2], "not an object"),
    ],
)
def test_a_lying_entry_is_refused(st_file: Write, entry: Any, words: str) -> None:
    path = st_file({"a": entry}, b"\0" * 8)
    with pytest.raises(ModelError, match=words) as caught:
        CheckpointIndex.open(path)
    assert caught.value.remedy


def test_overlaps_holes_and_trailing_bytes_are_refused(st_file: Write) -> None:
    two = {**F32_2, "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}
    with pytest.raises(ModelError, match="overlaps"):
        CheckpointIndex.open(st_file(two, b"\0" * 12))
    two["b"]["data_offsets"] = [12, 20]
    with pytest.raises(ModelError, match="4 unused bytes"):
        CheckpointIndex.open(st_file(two, b"\0" * 20))
    with pytest.raises(ModelError, match="tensors end at"):
        CheckpointIndex.open(st_file(F32_2, b"\0" * 9))


@pytest.mark.parametrize(
    ("raw", "length", "words"),
    [
        (b"{}", 2**63, "claims"),
        (b"{}", 3, "claims 3 bytes but"),
        (b"{]", None, "not valid JSON"),
        (b"\xff\xfe", None, "not valid JSON"),
        (b"[]", None, "not a JSON object"),
        (b"[" * 100_000, None, "not valid JSON"),
        (b'{"a": {}, "a": {}}', None, "appears twice"),
        (b'{"__metadata__": []}', None, "__metadata__"),
    ],
)
def test_a_damaged_header_is_refused(
    st_file: Write, raw: bytes, length: int | None, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        CheckpointIndex.open(st_file(raw, b"", length))


@FUZZ
@given(cut=st.integers(0, 79))
def test_every_truncation_is_refused(tmp_path: Path, cut: int) -> None:
    raw = json.dumps(F32_2).encode()
    whole = len(raw).to_bytes(8, "little") + raw + b"\0" * 8
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole[: min(cut, len(whole) - 1)])
    with pytest.raises(ModelError):
        CheckpointIndex.open(path)


@FUZZ
@given(edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_gives_our_error_or_an_index(tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    two = {**F32_2, "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]}}
    raw = json.dumps(two).encode()
    whole = bytearray(len(raw).to_bytes(8, "little") + raw + b"\0" * 16)
    for place, value in edits:
        whole[place % len(whole)] = value
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(whole))
    try:
        index = CheckpointIndex.open(path)
    except ModelError as error:
        assert error.cause and error.remedy
    else:
        assert index.nbytes == 16


def shard(folder: Path, name: str, tensor: str) -> None:
    header = {tensor: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
    raw = json.dumps(header).encode()
    (folder / name).write_bytes(len(raw).to_bytes(8, "little") + raw + b"abcd")


def sharded(folder: Path, weight_map: Any) -> None:
    body = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body))


def test_shards_are_joined(tmp_path: Path) -> None:
    shard(tmp_path, "m-1.safetensors", "a")
    shard(tmp_path, "m-2.safetensors", "b")
    sharded(tmp_path, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    index = CheckpointIndex.open(tmp_path)
    assert [index[n].file.name for n in "ab"] == ["m-1.safetensors", "m-2.safetensors"]
    assert len(index.files) == 2
    with pytest.raises(ModelError, match="no tensor 'c'"):
        index["c"]


def test_shard_faults_are_named(tmp_path: Path) -> None:
    shard(tmp_path, "m-1.safetensors", "a")
    sharded(tmp_path, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    with pytest.raises(ModelError, match=r"lacks 1 of 2 shards: m-2\.safetensors"):
        CheckpointIndex.open(tmp_path)
    shard(tmp_path, "m-2.safetensors", "a")
    with pytest.raises(ModelError, match="'a' is in both"):
        CheckpointIndex.open(tmp_path)
    shard(tmp_path, "m-2.safetensors", "c")
    with pytest.raises(ModelError, match="'b' in m-2"):
        CheckpointIndex.open(tmp_path)
    shard(tmp_path, "m-2.safetensors", "b")
    sharded(tmp_path, {"b": "m-1.safetensors", "a": "m-2.safetensors"})
    with pytest.raises(ModelError, match="does not hold it"):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize("bad", [{}, [], {"a": 1}, {"a": "../m.safetensors"}, {"a": ""}])
def test_a_bad_weight_map_is_refused(tmp_path: Path, bad: Any) -> None:
    sharded(tmp_path, bad)
    with pytest.raises(ModelError):
        CheckpointIndex.open(tmp_path)


def test_a_folder_without_readable_weights_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        CheckpointIndex.open(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="convert them to safetensors"):
        CheckpointIndex.open(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ModelError, match=r"x\.gguf"):
        CheckpointIndex.open(tmp_path)
    shard(tmp_path, "one.safetensors", "a")
    assert set(CheckpointIndex.open(tmp_path).tensors) == {"a"}
    shard(tmp_path, "two.safetensors", "b")
    with pytest.raises(ModelError, match=r"index\.json"):
        CheckpointIndex.open(tmp_path)
    with pytest.raises(ModelError, match="no file or folder"):
        CheckpointIndex.open(tmp_path / "absent")


def test_headers_and_references_import_without_torch_or_numpy() -> None:
    code = (
        "import sys, metainfer.formats.index, metainfer.formats.source, "
        "metainfer.formats.catalogue, metainfer.formats.safetensors_header;"
        "print([m for m in ('torch', 'numpy', 'gguf', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
