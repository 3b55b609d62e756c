"""The ledger's bytes of DeepSeek-V4's weights, layout by layout, against the published tables."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch
from metainfer.models.deepseek_v4.config import read_arch
from metainfer.models.registry import random_config
from metainfer.ops.catalog import builtin_registry
from metainfer.planner.weights import census, weight_rows

REGISTRY = builtin_registry()
FP8_SITES = (
    "linear.wqkv", "linear.wq_b", "out_group", "linear.wo_b", "linear.index_q",
    "linear.shared13", "linear.shared2",
)  # fmt: skip
BF16_SITES = ("linear_f32.csa", "linear_f32.hca")
EXPERTS = ("experts.w13", "experts.w2")
PLAIN = "norms and small parameters"


def arch_of(layers: int) -> DeepSeekV4Arch:
    params = {"layers": str(layers)} if layers != 43 else {}
    arch = read_arch(random_config("deepseek-v4-flash", params), "flash")
    assert isinstance(arch, DeepSeekV4Arch) and arch.layers == layers
    return arch


def rows(layers: int, weight: str, experts: str, stored: str) -> Mapping[str, int]:
    """Bytes by site; `stored`: the experts' scheme. The rest is as published: FP8 and bf16."""

    def scheme_of(name: str) -> str:
        if ".experts." in name:
            return stored
        plain = ("embed", "head", "compressor", "weights_proj", "ffn.gate.weight")
        return "BF16" if any(part in name for part in plain) else "fp8_128"

    layouts = {"weight": REGISTRY.layout(weight), "experts": REGISTRY.layout(experts)}
    found = weight_rows(census(arch_of(layers), scheme_of), layouts, "bfloat16")
    return {row.item: row.bytes for row in found}


def total(found: Mapping[str, int], sites: tuple[str, ...]) -> int:
    return sum(found[site] for site in sites)


@pytest.mark.parametrize(
    ("scheme", "megabytes", "exact"),
    [
        ("mxfp4", 13.37, 3 * 2048 * 4096 * 17 // 32),
        ("nvfp4", 14.16, 3 * (2048 * 4096 * 9 // 16 + 4)),
        ("fp8_128", 25.17, 3 * (2048 * 4096 + 16 * 32)),
    ],
)
@pytest.mark.parametrize("layers", [12, 43])
def test_experts_as_stored(scheme: str, megabytes: float, exact: int, layers: int) -> None:
    """Elements, scales and the second scale of every tensor."""
    held = total(rows(layers, "stored@1", "experts-stored@1", scheme), EXPERTS)
    assert held == layers * 256 * exact
    assert exact / 1e6 == pytest.approx(megabytes, abs=0.01)
    dense = total(rows(layers, "stored@1", "experts-dense@1", scheme), EXPERTS)
    assert dense == layers * 256 * 3 * 2048 * 4096 * 2


def test_all_routed_experts_are_147_gigabytes() -> None:
    held = total(rows(43, "stored@1", "experts-stored@1", "mxfp4"), EXPERTS)
    assert held / 1e9 == pytest.approx(147.2, abs=0.05)


def test_dense_weights_as_stored_are_those_of_the_table() -> None:
    found = rows(43, "stored@1", "experts-stored@1", "mxfp4")
    fp8 = total(found, FP8_SITES)
    assert fp8 / 1e9 == pytest.approx(5.857, abs=0.002)
    elements = fp8 * 16384 // 16385  # a scale byte for each 128 x 128, and nothing else
    assert elements + elements // 16384 == fp8
    # The table counts routers (43 x 256 x 4096) too; here they are small parameters, as stored.
    routers = 43 * 256 * 4096
    assert (total(found, BF16_SITES) + 2 * routers) / 1e9 == pytest.approx(0.709, abs=0.001)
    assert found["linear.lm_head"] == found["embed"] == 2 * 129280 * 4096
    small = found[PLAIN] - 2 * routers - 8 * 3 * 129280 * 6  # and the tables of token ids
    assert small / 1e9 == pytest.approx(0.135 + 0.004, abs=0.004)


@pytest.mark.parametrize(
    ("scheme", "dtype", "width"),
    [("BF16", "bfloat16", 2), ("BF16", "float32", 4), ("F32", "bfloat16", 4),
     ("F16", "bfloat16", 4)],
)  # fmt: skip
def test_a_router_is_as_narrow_as_its_numbers_allow(scheme: str, dtype: str, width: int) -> None:
    layouts = {"weight": REGISTRY.layout("dense@1"), "experts": REGISTRY.layout("experts-dense@1")}

    def held(gate: str) -> int:
        counted = census(arch_of(12), lambda name: gate if "gate.weight" in name else "F32")
        rows = weight_rows(counted, layouts, dtype)
        return next(row.bytes for row in rows if row.item == PLAIN)

    assert held("F32") - held(scheme) == (4 - width) * 12 * 256 * 4096


def test_twelve_layers_as_stored() -> None:
    """2 window, 5 CSA, 5 HCA layers, by hand."""
    found = rows(12, "stored@1", "experts-stored@1", "mxfp4")
    blocks = {
        "linear.wqkv": 12 * 1536 * 4096,
        "linear.wq_b": 12 * 32768 * 1024,
        "out_group": 12 * 8192 * 4096,
        "linear.wo_b": 12 * 4096 * 8192,
        "linear.index_q": 5 * 8192 * 1024,
        "linear.shared13": 12 * 4096 * 4096,
        "linear.shared2": 12 * 4096 * 2048,
    }
    for site, elements in blocks.items():
        assert found[site] == elements + elements // 16384, site
    assert found["linear_f32.csa"] == 5 * 2624 * 4096 * 2
    assert found["linear_f32.hca"] == 5 * 1024 * 4096 * 2


def test_decoded_weights_take_the_model_s_type() -> None:
    stored = rows(12, "stored@1", "experts-dense@1", "mxfp4")
    dense = rows(12, "dense@1", "experts-dense@1", "mxfp4")
    for site in FP8_SITES:
        assert dense[site] == 2 * (stored[site] * 16384 // 16385), site
    for site in (*BF16_SITES, *EXPERTS, "embed", "linear.lm_head", PLAIN):
        assert dense[site] == stored[site], site
