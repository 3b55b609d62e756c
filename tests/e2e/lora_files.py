"""LoRA adapters as PEFT saves them, written by hand, and the merged model they must equal.

`merged` follows Hu et al. 2021 and PEFT's documentation, and shares no code with the engine:
``W + scale * B @ A`` with ``scale = alpha / r``, or ``alpha / sqrt(r)`` with rank-stabilised LoRA.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from metainfer.planner.opening import open_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """One adapter. `ranks` and `alphas`: leaf name -> its own rank or alpha."""

    targets: Sequence[str]
    rank: int = 4
    alpha: float = 8
    rslora: bool = False
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)

    def rank_of(self, leaf: str) -> int:
        return self.ranks.get(leaf, self.rank)

    def scale_of(self, leaf: str) -> float:
        rank = self.rank_of(leaf)
        return self.alphas.get(leaf, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def config(self) -> dict[str, Any]:
        """What PEFT 0.21 writes, defaults included."""
        return {
            "alpha_pattern": self.alphas, "arrow_config": None, "auto_mapping": None,
            "base_model_name_or_path": "tiny", "bias": "none", "corda_config": None,
            "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
            "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
            "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
            "loftq_config": {}, "lora_alpha": self.alpha, "lora_bias": False,
            "lora_dropout": 0.05, "megatron_config": None, "megatron_core": "megatron.core",
            "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.21.0",
            "qalora_group_size": 16, "r": self.rank, "rank_pattern": self.ranks, "revision": None,
            "target_modules": list(self.targets), "target_parameters": None,
            "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None,
            "use_dora": False, "use_qalora": False, "use_rslora": self.rslora,
        }  # fmt: skip


def save_adapter(
    folder: Path, model: torch.nn.Module, recipe: Recipe, seed: int, size: float = 0.15
) -> dict[str, torch.Tensor]:
    """Write `recipe` with random pairs for `model`; its tensors by their stored names."""
    matrices = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    return save_pairs(folder, matrices, recipe, seed, size)


def save_pairs(
    folder: Path,
    matrices: Mapping[str, tuple[int, int]],
    recipe: Recipe,
    seed: int,
    size: float = 0.15,
) -> dict[str, torch.Tensor]:
    """`save_adapter` for matrices [N, K] by module name."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (n, k) in matrices.items():
        leaf = name.rpartition(".")[2]
        if leaf in recipe.targets:
            rank, stem = recipe.rank_of(leaf), f"base_model.model.{name}"
            tensors[f"{stem}.lora_A.weight"] = size * torch.randn(rank, k, generator=g)
            tensors[f"{stem}.lora_B.weight"] = size * torch.randn(n, rank, generator=g)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(recipe.config()))
    return tensors


def matrices_of(reference: str) -> dict[str, tuple[int, int]]:
    """The matrices of a model reference's layers by module name."""
    return {
        tensor.removesuffix(".weight"): (shape[0], shape[1])
        for spec in open_model(reference).arch.packed_weights()
        if spec.layer >= 0
        for tensor, shape in zip(spec.tensors, spec.tensor_shapes(), strict=True)
    }


def merged(model: Any, recipe: Recipe, tensors: dict[str, torch.Tensor]) -> Any:
    """A copy of the float64 `model` with the adapter in its weights."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in copied.named_modules():
            stem = f"base_model.model.{name}"
            if f"{stem}.lora_A.weight" in tensors:
                a, b = (tensors[f"{stem}.lora_{side}.weight"].double() for side in "AB")
                module.weight += recipe.scale_of(name.rpartition(".")[2]) * (b @ a)
    return copied
