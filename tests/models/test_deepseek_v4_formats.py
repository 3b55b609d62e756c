"""A tiny DeepSeek-V4 saved with its experts in each format: read back, it is bit for bit itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from metainfer.executor.loading import tensor_source
from metainfer.formats.block_codecs import BlockTensor, decode, encode
from metainfer.formats.blocks import FORMATS, BlockFormat
from metainfer.formats.convert import convert
from metainfer.formats.export import export
from metainfer.formats.lossless import same_bits
from metainfer.formats.quant import Stored, dequantise
from metainfer.formats.random_source import RandomSource
from metainfer.formats.safetensors_writer import Entry, Writer
from metainfer.planner.opening import OpenedModel, open_model

CPU = torch.device("cpu")
TINY = "random:tiny-deepseek-v4?layers=4"
FP4 = "random:tiny-deepseek-v4-fp4?layers=4"


def values(raw: Stored) -> torch.Tensor:
    return decode(raw, torch.float64) if isinstance(raw, BlockTensor) else dequantise(
        raw, torch.float64
    )  # fmt: skip


def matrices(model: OpenedModel) -> list[tuple[str, str]]:
    return [(name, spec.role) for spec in model.arch.packed_weights() for name in spec.tensors]


def section(fmt: BlockFormat) -> dict[str, Any]:
    if fmt.element == "e4m3":
        return {"quant_method": "fp8", "weight_block_size": list(fmt.block)}
    return {"quant_method": "fp8", "moe_quant_algo": "NVFP4"} if fmt.second != "none" else {}


def save(fmt: BlockFormat, folder: Path) -> dict[str, BlockTensor]:
    """The tiny model with its experts encoded in `fmt`, under the names of that format."""
    model = open_model(TINY)
    source = RandomSource(model.draws, 0)
    entries: list[Entry] = []
    data: dict[str, torch.Tensor] = {}
    kept: dict[str, BlockTensor] = {}

    def put(name: str, scheme: str, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape)
        entries.append(Entry(name, scheme, shape))
        data[name] = tensor

    for name, drawn in model.draws.items():
        raw = source.read(name)
        if ".ffn.experts." not in name:
            put(name, drawn.scheme, raw.data)
            continue
        tensor = encode(dequantise(raw, torch.float32), fmt)
        kept[name] = tensor
        put(fmt.leaf(name, fmt.data_leaf), fmt.data_dtype, tensor.data)
        put(fmt.leaf(name, fmt.scale_leaf), fmt.scale, tensor.scale)
        if tensor.second is not None:
            put(fmt.leaf(name, fmt.second_leaf), "F32", tensor.second)
    with Writer(folder, entries, shard_bytes=200_000) as writer:
        for name, tensor in data.items():
            writer.put(name, bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()))
    config = {**model.source.config, "quantization_config": section(fmt)}
    (folder / "config.json").write_text(json.dumps(config))
    return kept


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp8_row_32"])
def test_experts_in_every_format(name: str, tmp_path: Path) -> None:
    kept = save(FORMATS[name], tmp_path / "m")
    model, random = open_model(str(tmp_path / "m")), open_model(TINY)
    source, drawn = tensor_source(model, CPU), tensor_source(random, CPU)
    assert {model.facts.scheme_of(expert) for expert in kept} == {name}
    for tensor, role in matrices(model):
        wanted = kept[tensor] if role == "experts" else drawn.read(tensor)
        assert same_bits(values(source.read(tensor)), values(wanted)), tensor


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = open_model(FP4)
    folder = tmp_path_factory.mktemp("official") / "m"
    source = RandomSource(model.draws, 0)
    export(FP4, model.source.config, source, folder, shard_bytes=1_000_000)
    return folder


@pytest.mark.parametrize(
    ("chain", "scheme"),
    [(["fp8"], "fp8_128"), (["nvfp4"], "nvfp4"), (["nvfp4", "mxfp4"], "mxfp4")],
)
def test_conversions_keep_every_value(
    official: Path, chain: list[str], scheme: str, tmp_path: Path
) -> None:
    folder = official
    for to in chain:
        convert(folder, tmp_path / to, to, lossless=True, shard_bytes=1_000_000)
        folder = tmp_path / to
    before, after = open_model(str(official)), open_model(str(folder))
    old, new = tensor_source(before, CPU), tensor_source(after, CPU)
    for name, role in matrices(before):
        expected = scheme if role == "experts" else before.facts.scheme_of(name)
        assert after.facts.scheme_of(name) == expected, name
        assert same_bits(values(old.read(name)), values(new.read(name))), name
    for spec in before.arch.plain_weights():
        (name,) = spec.tensors
        assert torch.equal(old.read(name).data, new.read(name).data), name


def test_a_rounded_conversion_says_so_and_opens(official: Path, tmp_path: Path) -> None:
    convert(official, tmp_path / "fp8", "fp8")
    # Dense FP8 stays; the experts' own powers of two come back from FP8 rounded or not, by name.
    report = convert(tmp_path / "fp8", tmp_path / "back", "mxfp4")
    old = tensor_source(open_model(str(official)), CPU)
    new = tensor_source(open_model(str(tmp_path / "back")), CPU)
    for name, role in matrices(open_model(str(official))):
        if role == "experts":
            exact = same_bits(values(old.read(name)), values(new.read(name)))
            assert exact == (name not in report.rounded)


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = open_model(TINY)
    export(TINY, model.source.config, RandomSource(model.draws, 0), tmp_path / "m")
    other, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", output_loading_info=True, dtype=torch.float32
    )
    assert not any(said.values()), said
    source, state = tensor_source(model, CPU), other.state_dict()
    fused = torch.cat([values(source.read(f"layers.2.ffn.experts.5.{w}.weight"))
                       for w in ("w1", "w3")])  # fmt: skip
    assert torch.equal(state["model.layers.2.mlp.experts.gate_up_proj"][5].double(), fused)
    for module, name in (
        ("self_attn.compressor.position_bias", "attn.compressor.ape"),
        ("self_attn.compressor.indexer.kv_proj.weight", "attn.indexer.compressor.wkv.weight"),
        ("mlp.gate.weight", "ffn.gate.weight"),
        ("attn_hc.base", "hc_attn_base"),
    ):
        held = state[f"model.layers.2.{module}"].double()
        assert torch.equal(held, values(source.read(f"layers.2.{name}"))), name
