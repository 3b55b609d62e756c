"""DeepSeek-V4's weights: names, shapes and totals against the published tables."""

from __future__ import annotations

from collections import Counter

import pytest

from metainfer.core.errors import ModelError
from metainfer.models.arch import WeightSpec
from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch, LayerKind
from metainfer.models.deepseek_v4.weights import packed_weights, plain_weights
from metainfer.models.registry import random_config, read_arch


def arch_of(name: str, **params: str) -> DeepSeekV4Arch:
    arch = read_arch(random_config(name, params), name)
    assert isinstance(arch, DeepSeekV4Arch)
    return arch


FLASH = arch_of("deepseek-v4-flash")


def spec_of(name: str, arch: DeepSeekV4Arch = FLASH) -> WeightSpec:
    (found,) = (s for s in (*packed_weights(arch), *plain_weights(arch)) if s.name == name)
    return found


@pytest.mark.parametrize(
    ("name", "site", "shape", "rows"),
    [
        ("embed", "embed", (129280, 4096), ()),
        ("layers.0.wqkv", "linear.wqkv", (1536, 4096), (1024, 512)),
        ("layers.2.wq_b", "linear.wq_b", (32768, 1024), (32768,)),
        ("layers.2.wo_a", "out_group", (8192, 4096), (8192,)),
        ("layers.2.wo_b", "linear.wo_b", (4096, 8192), (4096,)),
        ("layers.2.compress", "linear_f32.csa", (2624, 4096), (1024, 1024, 256, 256, 64)),
        ("layers.3.compress", "linear_f32.hca", (1024, 4096), (512, 512)),
        ("layers.42.index_q", "linear.index_q", (8192, 1024), (8192,)),
        ("layers.5.w13", "experts.w13", (256 * 4096, 4096), (2048,) * 512),
        ("layers.5.w2", "experts.w2", (256 * 4096, 2048), (4096,) * 256),
        ("layers.5.shared13", "linear.shared13", (4096, 4096), (2048, 2048)),
        ("layers.5.shared2", "linear.shared2", (4096, 2048), (4096,)),
        ("lm_head", "linear.lm_head", (129280, 4096), ()),
    ],
)
def test_fused_matrices(
    name: str, site: str, shape: tuple[int, int], rows: tuple[int, ...]
) -> None:
    spec = spec_of(name)
    assert (spec.site, spec.shape, spec.rows) == (site, shape, rows)
    assert sum(part[0] for part in spec.tensor_shapes()) == shape[0]
    assert spec.role == ("experts" if site.startswith("experts.") else "weight")


def test_order_inside_fusions() -> None:
    compress = spec_of("layers.4.compress").tensors
    assert [name.removeprefix("layers.4.attn.") for name in compress] == [
        "compressor.wkv.weight", "compressor.wgate.weight", "indexer.compressor.wkv.weight",
        "indexer.compressor.wgate.weight", "indexer.weights_proj.weight",
    ]  # fmt: skip
    w13 = spec_of("layers.7.w13").tensors
    assert w13[:3] == tuple(
        f"layers.7.ffn.experts.{part}.weight" for part in ("0.w1", "0.w3", "1.w1")
    )
    assert w13[-1] == "layers.7.ffn.experts.255.w3.weight"


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("norm", (4096,), ""),
        ("hc_head_fn", (4, 16384), "float32"),
        ("hc_head_base", (4,), "float32"),
        ("hc_head_scale", (1,), "float32"),
        ("layers.0.attn_norm", (4096,), ""),
        ("layers.0.ffn_norm", (4096,), ""),
        ("layers.0.q_norm", (1024,), ""),
        ("layers.0.kv_norm", (512,), ""),
        ("layers.0.sinks", (64,), "float32"),
        ("layers.1.hc_attn_fn", (24, 16384), "float32"),
        ("layers.1.hc_ffn_base", (24,), "float32"),
        ("layers.1.hc_ffn_scale", (3,), "float32"),
        ("layers.2.ape", (4, 1024), "float32"),
        ("layers.2.compress_norm", (512,), "float32"),
        ("layers.2.index_ape", (4, 256), "float32"),
        ("layers.2.index_norm", (128,), "float32"),
        ("layers.3.ape", (128, 512), "float32"),
        ("layers.3.gate", (256, 4096), "exact"),
        ("layers.3.gate_bias", (256,), "float32"),
        ("layers.2.tid2eid", (129280, 6), "int64"),
    ],
)
def test_small_parameters(name: str, shape: tuple[int, ...], dtype: str) -> None:
    spec = spec_of(name)
    assert (spec.shape, spec.dtype) == (shape, dtype)


def test_what_a_layer_kind_has_not() -> None:
    names = {spec.name for spec in (*packed_weights(FLASH), *plain_weights(FLASH))}
    assert not names & {
        "layers.0.compress", "layers.0.ape", "layers.3.index_q", "layers.3.index_ape",
        "layers.3.tid2eid", "layers.2.gate_bias",
    }  # fmt: skip
    assert "layers.41.compress" in names and "layers.41.index_q" not in names


def test_totals_are_the_published_ones() -> None:
    specs = (*packed_weights(FLASH), *plain_weights(FLASH))
    floats = sum(spec.elements for spec in specs if spec.dtype != "int64")
    assert floats == pytest.approx(284.33e9, abs=5e6)
    sites = Counter(spec.site for spec in packed_weights(FLASH))
    assert (sites["linear_f32.csa"], sites["linear_f32.hca"], sites["linear.index_q"]) == (
        21,
        20,
        21,
    )
    assert len({spec.name for spec in specs}) == len(specs)
    tensors = [name for spec in specs for name in spec.tensors]
    assert len(set(tensors)) == len(tensors)


@pytest.mark.parametrize(("layers", "hashed"), [("1", 1), ("2", 2), ("12", 3), ("45", 3)])
def test_random_models_of_other_depths(layers: str, hashed: int) -> None:
    arch = arch_of("deepseek-v4-flash", layers=layers, seed="3")
    mix = (*FLASH.kinds, LayerKind.HCA, LayerKind.CSA)
    assert arch.kinds == mix[: int(layers)] and arch.hash_layers == hashed
    assert arch_of("tiny-deepseek-v4").layers == 6
    with pytest.raises(ModelError, match="layers"):
        random_config("deepseek-v4-flash", {"layers": "0"})
