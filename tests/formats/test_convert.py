"""Whole checkpoints converted: values kept or refused, other tensors byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from metainfer.core.errors import ModelError, RefusedError, UserError
from metainfer.formats.block_codecs import BlockTensor, decode, encode, from_stored
from metainfer.formats.blocks import FP8_128, MXFP4, BlockFormat
from metainfer.formats.checkpoint import Checkpoint
from metainfer.formats.checks import find_weights, read_config
from metainfer.formats.convert import convert
from metainfer.formats.lossless import same_bits
from metainfer.formats.safetensors_writer import Entry, Writer

E = "layers.0.ffn.experts"
NAMES = [f"{E}.{e}.{w}.weight" for e in (0, 1) for w in ("w1", "w2", "w3")]
MTP = "mtp.0.ffn.experts.0.w1.weight"
WQ = "layers.0.attn.wq_a.weight"


def make(folder: Path, experts: BlockFormat = MXFP4, spread: int = 0) -> dict[str, BlockTensor]:
    """A small checkpoint in V4's names; `spread` widens the scales of one tensor's blocks."""
    generator = torch.Generator().manual_seed(5)
    stored = {}
    for name in [WQ, *NAMES, MTP]:
        values = torch.randn(64, 96 if ".w2." not in name else 64, generator=generator)
        if name == NAMES[0] and spread:
            values[0, :32] *= 2.0**-spread
        stored[name] = encode(values, FP8_128 if name == WQ else experts)
    norm = torch.randn(64, generator=generator).bfloat16()
    entries, data = [Entry("norm.weight", "BF16", (64,))], {"norm.weight": norm}
    for name, tensor in stored.items():
        fmt, scale = tensor.format, name.replace(".weight", ".scale")
        entries.append(Entry(name, fmt.data_dtype, fmt.data_shape(*tensor.shape)))
        entries.append(Entry(scale, fmt.scale, fmt.scale_shape(*tensor.shape)))
        data |= {name: tensor.data, scale: tensor.scale}
    with Writer(folder, entries, shard_bytes=20_000) as writer:
        for name, part in data.items():
            writer.put(name, bytes(part.reshape(-1).view(torch.uint8).tolist()))
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    kind = "fp4" if experts == MXFP4 else "fp8"
    config = {"model_type": "deepseek_v4", "quantization_config": section, "expert_dtype": kind}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return stored


def load(folder: Path) -> dict[str, BlockTensor]:
    checkpoint = Checkpoint.open(folder)
    config = read_config(json.loads((folder / "config.json").read_text()))
    found = find_weights(config, checkpoint.index.tensors)
    return {
        name: from_stored(
            weight.format,
            checkpoint.read(weight.data).data,
            checkpoint.read(weight.scale).data,
            checkpoint.read(weight.second).data if weight.second else None,
        )
        for name, weight in found.items()
    }


def experts_of(folder: Path) -> str:
    return read_config(json.loads((folder / "config.json").read_text())).experts


def raw(folder: Path, name: str) -> bytes:
    tensor = Checkpoint.open(folder).read(name).data
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def equal(a: BlockTensor, b: BlockTensor) -> bool:
    return same_bits(decode(a, torch.float64), decode(b, torch.float64))


def test_nvfp4_is_lossless_and_the_rest_is_untouched(tmp_path: Path) -> None:
    before = make(tmp_path / "a")
    report = convert(tmp_path / "a", tmp_path / "b", "nvfp4", lossless=True, shard_bytes=20_000)
    assert (report.converted, report.rounded, report.unfused) == (6, [], [])
    after = load(tmp_path / "b")
    assert all(equal(before[name], after[name]) for name in before)
    assert {after[name].format.name for name in NAMES} == {"nvfp4"}
    assert after[MTP].format.identifier == MXFP4.identifier
    for name in ("norm.weight", WQ, WQ.replace(".weight", ".scale"), MTP):
        assert raw(tmp_path / "a", name) == raw(tmp_path / "b", name)
    for expert in (0, 1):  # fused matrices share their second scale
        a, b = (after[f"{E}.{expert}.{w}.weight"].second for w in ("w1", "w3"))
        assert a is not None and b is not None and torch.equal(a, b)
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"
    assert experts_of(tmp_path / "b") == "nvfp4"
    assert f"{E}.0.w1.scale" not in Checkpoint.open(tmp_path / "b").index.tensors
    total = Checkpoint.open(tmp_path / "b").index.nbytes
    assert report.bytes_after == total > report.bytes_before


def test_what_cannot_be_kept_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    make(tmp_path / "a", spread=40)
    with pytest.raises(RefusedError, match=r"1 of 6 tensors .*experts\.0\.w1\.weight' span") as e:
        convert(tmp_path / "a", tmp_path / "b", "nvfp4", lossless=True)
    assert e.value.code == "not_lossless" and not (tmp_path / "b").exists()
    report = convert(tmp_path / "a", tmp_path / "b", "nvfp4")
    assert report.rounded == [NAMES[0]] and report.unfused == [NAMES[0], NAMES[2]]
    assert report.to_json()["exact"] == 5


def test_fp8_and_back(tmp_path: Path) -> None:
    before = make(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", "fp8", lossless=True)
    after = load(tmp_path / "b")
    assert all(equal(before[name], after[name]) for name in before)
    assert {tensor.format.identifier for tensor in after.values()} == {FP8_128.identifier}
    report = convert(tmp_path / "b", tmp_path / "c", "mxfp4")
    assert report.converted == 7
    again = load(tmp_path / "c")
    assert all(again[name].format.identifier == MXFP4.identifier for name in NAMES)
    convert(tmp_path / "c", tmp_path / "d", "nvfp4", lossless=True)
    convert(tmp_path / "d", tmp_path / "e", "mxfp4", lossless=True)
    last = load(tmp_path / "e")
    assert [experts_of(tmp_path / x) for x in "bcde"] == ["fp8", "fp4", "nvfp4", "fp4"]
    assert all(equal(again[name], last[name]) for name in NAMES)


def test_rounding_is_reported(tmp_path: Path) -> None:
    make(tmp_path / "a", experts=FP8_128)
    report = convert(tmp_path / "a", tmp_path / "b", "mxfp4")
    assert len(report.rounded) == report.converted == 7
    with pytest.raises(RefusedError, match="7 of 7 tensors"):
        convert(tmp_path / "a", tmp_path / "c", "mxfp4", lossless=True)


def test_conversion_is_deterministic(tmp_path: Path) -> None:
    make(tmp_path / "a")
    for name in ("x", "y"):
        convert(tmp_path / "a", tmp_path / name, "nvfp4", shard_bytes=10_000)
    files = sorted(path.name for path in (tmp_path / "x").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "y").iterdir()) and len(files) > 4
    for file in files:
        assert (tmp_path / "x" / file).read_bytes() == (tmp_path / "y" / file).read_bytes()


def test_nothing_to_do_and_full_folders(tmp_path: Path) -> None:
    make(tmp_path / "a")
    with pytest.raises(ModelError, match="no routed experts to convert to mxfp4") as caught:
        convert(tmp_path / "a", tmp_path / "b", "mxfp4")
    assert caught.value.code == "nothing_to_convert"
    with pytest.raises(UserError, match="not an empty folder"):
        convert(tmp_path / "a", tmp_path / "a", "nvfp4")
