"""A checkpoint's headers against its configuration: everything wrong is named, in one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metainfer.core.errors import RefusedError
from metainfer.formats.blocks import FP8_32, FP8_128, FP8_128_F32, MXFP4, NVFP4, NVFP4_COMPRESSED
from metainfer.formats.checks import QuantConfig, find_weights, read_config
from metainfer.formats.index import TensorInfo

Spec = dict[str, tuple[str, tuple[int, ...]]]

V4: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "expert_dtype": "fp4",
}
V4_TENSORS: Spec = {
    "embed.weight": ("BF16", (1000, 4096)),
    "layers.0.attn.wq_a.weight": ("F8_E4M3", (1024, 4096)),
    "layers.0.attn.wq_a.scale": ("F8_E8M0", (8, 32)),
    "layers.0.hc_attn_scale": ("F32", (3,)),
    "layers.0.ffn.experts.0.w1.weight": ("I8", (2048, 2048)),
    "layers.0.ffn.experts.0.w1.scale": ("F8_E8M0", (2048, 128)),
    "layers.0.ffn.experts.0.w2.weight": ("I8", (4096, 1024)),
    "layers.0.ffn.experts.0.w2.scale": ("U8", (4096, 64)),
}
SHAPES = {
    "layers.0.attn.wq_a.weight": (1024, 4096),
    "layers.0.ffn.experts.0.w1.weight": (2048, 4096),
    "layers.0.ffn.experts.0.w2.weight": (4096, 2048),
    "embed.weight": (1000, 4096),
}
W1 = "layers.0.ffn.experts.0.w1"
WQ = "layers.0.attn.wq_a"


def headers(spec: Spec) -> dict[str, TensorInfo]:
    here = Path("model.safetensors")
    return {
        name: TensorInfo(name, dtype, shape, 0, here, 0) for name, (dtype, shape) in spec.items()
    }


def objections(
    change: Spec | None = None, drop: tuple[str, ...] = (), config: dict[str, Any] | None = None
) -> list[str]:
    spec = {k: v for k, v in {**V4_TENSORS, **(change or {})}.items() if k not in drop}
    try:
        find_weights(read_config(config or V4), headers(spec), SHAPES)
    except RefusedError as error:
        assert error.code == "bad_checkpoint"
        return [reason.message for reason in error.reasons]
    return []


def test_the_published_layout_is_accepted() -> None:
    for expected in (SHAPES, None):
        found = find_weights(read_config(V4), headers(V4_TENSORS), expected)
        assert {name: weight.format for name, weight in found.items()} == {
            f"{WQ}.weight": FP8_128,
            f"{W1}.weight": MXFP4,
            "layers.0.ffn.experts.0.w2.weight": MXFP4,
        }
        assert all(weight.shape == SHAPES[name] for name, weight in found.items())
        assert found[f"{W1}.weight"].scale == f"{W1}.scale"


def test_the_april_config_does_not_name_the_experts() -> None:
    config = {"quantization_config": V4["quantization_config"]}
    assert objections(config=config) == []


WRONG: list[tuple[Spec, list[str]]] = [
    (
        {f"{WQ}.scale": ("F8_E8M0", (8, 31))},
        [f"{WQ}.scale F8_E8M0 [8, 31] where a [1024, 4096] matrix needs F8_E8M0 or U8 [8, 32]"],
    ),
    (
        {f"{WQ}.scale": ("BF16", (8, 32))},
        [f"{WQ}.scale BF16 [8, 32] where a [1024, 4096] matrix needs F8_E8M0 or U8 [8, 32]"],
    ),
    (
        {f"{WQ}.weight": ("F8_E4M3", (1024, 2048))},
        [
            f"{WQ}.weight F8_E4M3 [1024, 2048] where a [1024, 4096] matrix needs "
            "F8_E4M3 [1024, 4096]"
        ],
    ),
    (
        {f"{W1}.weight": ("I8", (2048, 4096))},
        [f"{W1}.weight I8 [2048, 4096] where a [2048, 4096] matrix needs I8 or U8 [2048, 2048]"],
    ),
    (
        {f"{W1}.scale": ("F32", (2048, 128))},
        [f"{W1}.scale F32 [2048, 128] where a [2048, 4096] matrix needs F8_E8M0 or U8 [2048, 128]"],
    ),
    (
        {f"{W1}.weight": ("F8_E4M3", (2048, 4096)), f"{W1}.scale": ("F8_E8M0", (16, 32))},
        [f"{W1}.weight F8_E4M3 [2048, 4096] where the config says fp4"],
    ),
    (
        {f"{WQ}.weight": ("BF16", (1024, 4096))},
        [
            f"{WQ}.scale F8_E8M0 [8, 32] is a scale beside {WQ}.weight BF16 "
            "[1024, 4096], which is not quantised"
        ],
    ),
    ({"x.scale": ("F32", (1,))}, ["x.scale F32 [1] is a scale without a weight"]),
    (
        {"embed.weight": ("BF16", (1000, 4095))},
        ["embed.weight BF16 [1000, 4095] where the model needs [1000, 4096]"],
    ),
    ({f"{WQ}.weight": ("F8_E4M3", (1024,))}, [f"{WQ}.weight F8_E4M3 [1024] is not a matrix"]),
]


@pytest.mark.parametrize(("change", "messages"), WRONG)
def test_each_fault_is_named_with_both_shapes(change: Spec, messages: list[str]) -> None:
    assert objections(change) == messages


def test_what_is_missing_is_named() -> None:
    assert objections(drop=(f"{WQ}.scale",)) == [
        f"{WQ}.weight F8_E4M3 [1024, 4096] has no {WQ}.scale"
    ]
    assert objections(drop=(f"{W1}.scale",)) == [f"{W1}.weight I8 [2048, 2048] has no {W1}.scale"]
    assert objections(drop=("embed.weight",)) == ["embed.weight [1000, 4096] is missing"]


def test_all_faults_come_at_once() -> None:
    change: Spec = {f"{WQ}.scale": ("F8_E8M0", (8, 31)), f"{W1}.scale": ("F8_E8M0", (2048, 64))}
    assert len(objections(change, drop=("embed.weight",))) == 3


def test_a_config_without_blocks_is_refused() -> None:
    assert objections(config={"expert_dtype": "fp4"}) == [
        f"{WQ}.weight F8_E4M3 [1024, 4096] but the config has no weight_block_size"
    ]
    with pytest.raises(RefusedError, match=r"weight_block_size is \[128\]"):
        read_config({"quantization_config": {"weight_block_size": [128]}})


def test_base_and_hugging_face_names() -> None:
    spec: Spec = {
        "model.layers.0.mlp.experts.0.up_proj.weight": ("F8_E4M3", (256, 384)),
        "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv": ("F32", (2, 3)),
    }
    config = QuantConfig(block=(128, 128))
    (found,) = find_weights(config, headers(spec)).values()
    assert found.format.identifier == FP8_128_F32.identifier
    assert found.scale.endswith("weight_scale_inv")


def test_v41_blocks_and_engram_rows() -> None:
    config = read_config(
        {"text_config": {"quantization_config": {"weight_block_size": [32, 32],
                                                  "expert_dtype": "fp4"}}}
    )  # fmt: skip
    assert config == QuantConfig((32, 32), "fp4")
    spec: Spec = {
        "layers.1.engram.embed.weight": ("F8_E4M3", (1000, 256)),
        "layers.1.engram.embed.scale": ("F8_E8M0", (1000, 8)),
        "layers.1.engram.wkv.weight": ("F8_E4M3", (25600, 6144)),
        "layers.1.engram.wkv.scale": ("F8_E8M0", (800, 192)),
    }
    found = find_weights(config, headers(spec))
    assert found["layers.1.engram.embed.weight"].format.block == (1, 32)
    assert found["layers.1.engram.wkv.weight"].format == FP8_32


NV_CONFIG = QuantConfig((128, 128), "nvfp4", ("*.attn.*", "mtp.*"))
NV_TENSORS: Spec = {
    f"{W1}.weight": ("U8", (2048, 2048)),
    f"{W1}.weight_scale": ("F8_E4M3", (2048, 256)),
    f"{W1}.weight_scale_2": ("F32", ()),
    f"{W1}.input_scale": ("F32", ()),
    "mtp.0.ffn.experts.0.w1.weight": ("I8", (2048, 2048)),
    "mtp.0.ffn.experts.0.w1.scale": ("F8_E8M0", (2048, 128)),
}


def test_modelopt_files_mix_nvfp4_and_mxfp4() -> None:
    config = read_config(
        {
            "quantization_config": {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "quant_algo": "MIXED_PRECISION",
                "moe_quant_algo": "NVFP4",
                "group_size": 16,
                "ignore": ["*.attn.*", "mtp.*"],
            }
        }
    )
    assert config == NV_CONFIG
    found = find_weights(config, headers(NV_TENSORS))
    assert found[f"{W1}.weight"].format == NVFP4
    assert found[f"{W1}.weight"].second == f"{W1}.weight_scale_2"
    assert found["mtp.0.ffn.experts.0.w1.weight"].format == MXFP4


@pytest.mark.parametrize(
    ("change", "drop", "message"),
    [
        ({}, f"{W1}.weight_scale_2", f"has no {W1}.weight_scale_2"),
        ({f"{W1}.weight_scale": ("F8_E4M3", (2048, 128))}, "", r"needs F8_E4M3 \[2048, 256\]"),
        ({f"{W1}.weight_scale": ("U8", (2048, 256))}, "", r"needs F8_E4M3 \[2048, 256\]"),
        ({f"{W1}.weight_scale_2": ("F32", (2,))}, "", r"scale_2 F32 \[2\] needs to be one F32"),
        ({f"{W1}.input_scale": ("BF16", ())}, "", r"input_scale BF16 \[\] needs to be one F32"),
        (
            {
                "layers.9.ffn.experts.0.w1.weight": ("I8", (64, 32)),
                "layers.9.ffn.experts.0.w1.scale": ("F8_E8M0", (64, 2)),
            },
            "",
            "is MXFP4 where the config says NVFP4",
        ),
        (
            {
                "mtp.1.w.weight": ("U8", (64, 32)),
                "mtp.1.w.weight_scale": ("F8_E4M3", (64, 4)),
                "mtp.1.w.weight_scale_2": ("F32", ()),
            },
            "",
            "is NVFP4 but the config ignores it",
        ),
    ],
)
def test_faults_of_nvfp4_files(change: Spec, drop: str, message: str) -> None:
    spec = {k: v for k, v in {**NV_TENSORS, **change}.items() if k != drop}
    with pytest.raises(RefusedError, match=message):
        find_weights(NV_CONFIG, headers(spec))


def test_compressed_tensors_names() -> None:
    spec: Spec = {
        "a.weight_packed": ("U8", (64, 32)),
        "a.weight_scale": ("F8_E4M3", (64, 4)),
        "a.weight_global_scale": ("F32", (1,)),
    }
    (found,) = find_weights(QuantConfig(), headers(spec), {"a.weight": (64, 64)}).values()
    assert found.format == NVFP4_COMPRESSED and found.data == "a.weight_packed"
    del spec["a.weight_global_scale"]
    with pytest.raises(RefusedError, match=r"has no a\.weight_global_scale"):
        find_weights(QuantConfig(), headers(spec))


def test_unpackable_group_sizes_are_refused() -> None:
    with pytest.raises(RefusedError, match="group_size is 32"):
        read_config({"quantization_config": {"moe_quant_algo": "NVFP4", "group_size": 32}})
