"""`transformers`' DeepSeek-V4 as a float64 oracle.

Its code casts to float32 in norms, router, softmax and rotation even when the model is float64, so
near-ties flip and errors stay at 1e-7. `lifted` makes those casts go to float64: nothing else of
the oracle changes, and the bars can be those of float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from metainfer.ops.linear.packed import PackedWeight

#: float64 against float64, other orders of summation.
TIGHT = {"rtol": 1e-11, "atol": 1e-12}


class _Wide:
    """`torch`, with float32 standing for float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def lifted() -> Iterator[None]:
    """Inside, the oracle's casts to float32 give float64."""
    narrow = torch.Tensor.float
    theirs.torch, torch.Tensor.float = _Wide(), torch.Tensor.double  # type: ignore
    try:
        yield
    finally:
        theirs.torch, torch.Tensor.float = torch, narrow  # type: ignore


def config(**changes: Any) -> DeepseekV4Config:
    """A tiny model with every kind of layer."""
    values: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 8,
        "compress_ratios": [0, 0, 4, 128, 4, 128],
        "compress_rate_hca": 16,
        "num_hash_layers": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 4,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 4096,
        "pad_token_id": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    made = DeepseekV4Config(**values)
    made._attn_implementation = "eager"
    return made


def filled(module: nn.Module, seed: int, scale: float = 0.3) -> nn.Module:
    """`module` in float64 with every float parameter and buffer of training drawn from `seed`."""
    g = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g, dtype=torch.float64) * scale)
    return module


def table(module: nn.Module, kind: str, length: int) -> Tensor:
    """Their cosines and sines as our table: float64 [length, R]. Call it inside `lifted`."""
    x = torch.zeros(1, dtype=torch.float64)
    cos, sin = module(x, torch.arange(length)[None], layer_type=kind)
    return torch.cat((cos[0], sin[0]), dim=-1)


def packed(weight: Tensor) -> PackedWeight:
    """A matrix, or a stack of them laid end to end, as the references read it."""
    flat = weight.detach().flatten(0, -2)
    return PackedWeight("dense@1", (flat.shape[0], flat.shape[1]), {"weight": flat})


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
