"""Checkpoints and adapters that `ranks_tokens.py` draws: shapes that no ``random:`` name has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from metainfer.formats.block_codecs import BlockTensor
from metainfer.formats.drawn import Drawn
from metainfer.formats.export import export
from metainfer.formats.quant import RawTensor
from metainfer.formats.random_source import RandomSource
from metainfer.models.registry import random_config, random_draws, read_arch
from metainfer.planner.opening import open_model

Draw = Callable[[str, Drawn], Tensor]
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WORDS = ("embed.weight", "head.weight", "embed_tokens.weight")
DRAFTING = {
    "num_attention_heads": 8,
    "o_groups": 4,
    "index_n_heads": 16,  # with few of them entries tie at exactly 0
    "num_nextn_predict_layers": 1,
}


def noise(seed: int, device: str = "cpu") -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device)


def _save(folder: Path, config: Mapping[str, Any], draws: Mapping[str, Drawn], draw: Draw) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: draw(name, drawn).contiguous().cpu() for name, drawn in draws.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def dense(
    folder: Path, seed: int, loud: float, kind: torch.dtype, device: str = "cpu", **shape: int
) -> Path:
    """A dense model of `shape` (of its config), stored as `kind`; matrices of deviation `loud`,
    words of 0.3. Other devices draw other numbers."""
    config = {**random_config("tiny-llama", {}), **shape}
    made = noise(seed, device)

    def draw(name: str, drawn: Drawn) -> Tensor:
        deviation = 0.3 if name.endswith(WORDS) else loud if len(drawn.shape) == 2 else 0.2
        return (drawn.mean + deviation * made(*drawn.shape)).to(kind)

    return _save(folder, config, random_draws(read_arch(config, str(folder)), config), draw)


def drafting(folder: Path, seed: int, loud: float) -> Path:
    """A tiny DeepSeek-V4 with its draft layer, in float32.

    Its layers are quiet beside words and the draft layer passes the next word on, so that some
    drafts are right and some are not.
    """
    config = random_config("tiny-deepseek-v4", {"layers": "4"}) | DRAFTING
    arch, made = read_arch(config, str(folder)).with_draft(), noise(seed)

    def draw(name: str, drawn: Drawn) -> Tensor:
        if drawn.below:
            keys = made(drawn.shape[0], drawn.below)
            return keys.argsort(dim=1)[:, : drawn.shape[1]]
        if name.endswith(("e_proj.weight", "h_proj.weight")):
            size = 1.0 if name.endswith("e_proj.weight") else 0.1
            return size * torch.eye(drawn.shape[0]) + 0.02 * made(*drawn.shape)
        deviation = drawn.deviation
        if len(drawn.shape) == 2 and not drawn.mean:
            deviation = 0.3 if name.endswith(WORDS) else loud
        return (drawn.mean + deviation * made(*drawn.shape)).float()

    return _save(folder, config, random_draws(arch, config), draw)


class Passing(RandomSource):
    """Random tensors in the published formats; a draft layer passes the next word on."""

    def read(self, name: str) -> RawTensor | BlockTensor:
        found = super().read(name)
        if not name.endswith("e_proj.weight") or not isinstance(found, BlockTensor):
            return found
        one = torch.eye(self.draws[name].shape[0]).to(torch.float8_e4m3fn).view(torch.uint8)
        return replace(found, data=one, scale=torch.full_like(found.scale, 127))


def stored(folder: Path, seed: int, loud: float) -> Path:
    """`drafting` as published files are: FP8 blocks, experts in MXFP4; steps of it are captured."""
    config = random_config("tiny-deepseek-v4-fp4", {"layers": "4"}) | DRAFTING
    config["moe_intermediate_size"] = 256  # a block for each rank
    arch = read_arch(config, str(folder)).with_draft()
    draws = {
        name: drawn
        if drawn.below or drawn.mean or len(drawn.shape) != 2
        else replace(drawn, deviation=0.3 if name.endswith(WORDS) else loud)
        for name, drawn in random_draws(arch, config).items()
    }
    export(str(seed), config, Passing(draws, seed), folder)
    return folder


def adapter(folder: Path, model: str, seed: int, rank: int, size: float) -> Path:
    """A LoRA adapter of every matrix of `model`'s layers, as PEFT saves it; pairs of deviation
    `size`, alpha twice the rank."""
    made, tensors = noise(seed), dict[str, Tensor]()
    for spec in open_model(model).arch.packed_weights():
        for tensor, (n, k) in zip(spec.tensors, spec.tensor_shapes(), strict=True):
            name = tensor.removesuffix(".weight")
            if spec.layer >= 0 and name.rpartition(".")[2] in ADAPTED:
                tensors[f"base_model.model.{name}.lora_A.weight"] = size * made(rank, k)
                tensors[f"base_model.model.{name}.lora_B.weight"] = size * made(n, rank)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": list(ADAPTED), "bias": "none", "use_dora": False, "use_rslora": False,
        "base_model_name_or_path": model, "inference_mode": True,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
