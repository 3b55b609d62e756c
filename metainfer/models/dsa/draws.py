"""Random weights of these models, each stored as the published files store it. No torch.

Without a ``quantization_config`` everything is BF16. FP8 files hold every projection of attention,
dense, shared and routed experts and the indexer's wq_b and wk in blocks; norms, gates, head weights
of the indexer, ``eh_proj``, embedding and head stay BF16, the router's bias float32.
"""

from __future__ import annotations

from collections.abc import Mapping

from metainfer.formats.blocks import NVFP4, fp8_block
from metainfer.formats.checks import read_config
from metainfer.formats.drawn import Drawn
from metainfer.models.dsa.arch import DsaArch

_PLAIN_SITES = ("embed", "linear.lm_head", "linear_f32.index_w", "linear.mtp_eh", "moe_route")
ROUTER_BIAS = "e_score_correction_bias"


def draws(arch: DsaArch, config: Mapping[str, object]) -> dict[str, Drawn]:
    """Every tensor by its stored name, layer by layer."""
    quant = read_config(config)
    blocks = fp8_block(quant.block, "F32").name if quant.block else "BF16"
    experts = NVFP4.name if quant.experts == "nvfp4" else blocks
    specs = sorted(
        (*arch.packed_weights(), *arch.plain_weights()),
        key=lambda spec: spec.layer if spec.layer >= 0 else -1 if spec.site == "embed" else 1 << 30,
    )
    found: dict[str, Drawn] = {}
    for spec in specs:
        scheme = experts if spec.role == "experts" and spec.layer < arch.layers else blocks
        for name, shape in zip(spec.tensors, spec.tensor_shapes(), strict=True):
            if name.endswith(ROUTER_BIAS):
                found[name] = Drawn(shape, "F32")
            elif len(shape) == 1:
                found[name] = Drawn(shape, "BF16", mean=1.0 if name.endswith("weight") else 0.0)
            else:
                found[name] = Drawn(shape, "BF16" if spec.site in _PLAIN_SITES else scheme)
    return found
