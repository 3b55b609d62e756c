"""Random weights of DeepSeek-V4, each stored as the published files store it. No torch.

Without a ``quantization_config`` matrices are BF16. Deviations follow the initialiser (0.02); the
hyper-connections start as a fresh model's (base 0, scale 1), a little off so that each counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from metainfer.core.errors import ModelError
from metainfer.formats.blocks import MXFP4, fp8_block
from metainfer.formats.checks import read_config
from metainfer.formats.drawn import Drawn
from metainfer.models.arch import WeightSpec
from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch

_FP8_SITES = (
    "linear.wqkv", "linear.wq_b", "linear.index_q", "out_group", "linear.wo_b",
    "linear.shared13", "linear.shared2", "linear.mtp_e", "linear.mtp_h",
)  # fmt: skip


def draws(arch: DeepSeekV4Arch, config: Mapping[str, object]) -> dict[str, Drawn]:
    """Every tensor by the publisher's name, in the order of the layers.

    Raises:
        ModelError: the config names a format in which no weights are drawn.
    """
    quant = read_config(config)
    dense = fp8_block(quant.block, "F8_E8M0").name if quant.block else "BF16"
    experts = {"fp4": MXFP4.name, "fp8": dense, "": dense}.get(quant.experts, "")
    if not experts or (quant.experts == "fp8" and not quant.block):
        raise ModelError(
            f"no random experts are drawn in {quant.experts!r}.",
            "Draw fp4 or fp8 and convert the checkpoint.",
            code="unsupported_scheme",
        )
    specs = sorted((*arch.packed_weights(), *arch.plain_weights()), key=_place)
    found: dict[str, Drawn] = {}
    for spec in specs:
        scheme = experts if spec.role == "experts" else "BF16"
        if spec.site in _FP8_SITES:
            scheme = dense
        for name, shape in zip(spec.tensors, spec.tensor_shapes(), strict=True):
            found[name] = _drawn(spec, name, shape, scheme, arch)
    return found


def _place(spec: WeightSpec) -> float:
    """Embedding, layers in order, the rest (the sort is stable)."""
    return spec.layer if spec.layer >= 0 else -1 if spec.site == "embed" else float("inf")


def _drawn(
    spec: WeightSpec, name: str, shape: tuple[int, ...], scheme: str, arch: DeepSeekV4Arch
) -> Drawn:
    if spec.dtype == "int64":
        return Drawn(shape, "I64", below=arch.experts)
    if spec.site == "rmsnorm" or name.endswith("norm.weight"):
        return Drawn(shape, "BF16", mean=1.0)
    if not spec.dtype or name.endswith(".weight"):
        return Drawn(shape, scheme)
    if name.endswith("_scale"):
        return Drawn(shape, "F32", mean=1.0)
    loud = 0.1 if name.endswith((".ape", ".attn_sink")) else 0.02
    return Drawn(shape, "F32", deviation=loud)
