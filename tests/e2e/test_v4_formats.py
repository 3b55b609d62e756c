"""A tiny DeepSeek-V4 stored in low precision, run from what is stored, against `transformers`.

The oracle holds the dequantised weights in float64 and rounds what enters each low-precision
product as the recipe says (deepseek-v4.md 2.7): e4m3 per token and group of channels, the routing
weight multiplied in before w2. Engine and oracle must then agree to float64's noise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import v4
from harness import start
from test_v4_oracle import Recorder, prompts, scored
from torch import Tensor

from metainfer.executor.loading import tensor_source
from metainfer.formats.activation import activation_fp8
from metainfer.formats.block_codecs import BlockTensor, decode
from metainfer.formats.convert import convert
from metainfer.formats.export import export
from metainfer.formats.quant import dequantise
from metainfer.formats.random_source import RandomSource
from metainfer.planner.opening import open_model

REFERENCE = "random:tiny-deepseek-v4-fp4?seed=3"
STORED = {"weight": "stored@1", "experts": "experts-stored@1", "kv": "latent@1", "index": "index@1"}
ROUNDED = (
    "q_a_proj",
    "self_attn.kv_proj",
    "q_b_proj",
    "o_b_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
CPU = torch.device("cpu")


def rounded(x: Tensor) -> Tensor:
    """What enters a product: groups of 128 channels, or all of a narrower row."""
    return activation_fp8(x, min(128, x.shape[-1]))


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("official") / "m"
    model = open_model(REFERENCE)
    # All entries are selected: with four index heads many tie at zero.
    config = {**model.source.config, "index_topk": 64}
    export(REFERENCE, config, RandomSource(model.draws, 3), folder)
    return folder


def stored_in(kind: str, official: Path, folder: Path) -> Path:
    if kind == "mxfp4":
        return official
    convert(official, folder / "c", to=kind)
    return folder / "c"


def oracle_of(checkpoint: Path, folder: Path) -> Any:
    """The dequantised weights in `transformers`, in float64, rounding what enters its products."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    opened = open_model(str(checkpoint))
    source = tensor_source(opened, CPU)
    tensors: dict[str, Tensor] = {}
    for spec in (*opened.arch.packed_weights(), *opened.arch.plain_weights()):
        for name in spec.tensors:
            raw = source.read(name)
            if isinstance(raw, BlockTensor):
                tensors[name] = decode(raw, torch.float32)
            elif spec.dtype == "int64":
                tensors[name] = raw.data.clone()
            else:
                tensors[name] = dequantise(raw, torch.float32).clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    for key in ("quantization_config", "expert_dtype"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.double().eval()
    for name, module in model.named_modules():
        if name.endswith(ROUNDED) and not name.endswith(
            ("compressor.gate_proj", "indexer.gate_proj")
        ):
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))
        if isinstance(module, modeling.DeepseekV4Experts):
            module.forward = _experts.__get__(module)
    return model


def _experts(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The recipe's order: x rounded, the weighted hidden activation rounded, then w2."""
    out = torch.zeros_like(x)
    entering = rounded(x)
    for t in range(x.shape[0]):
        for k, expert in enumerate(index[t].tolist()):
            hidden = self._apply_gate(self.gate_up_proj[expert] @ entering[t])
            hidden = rounded((hidden * weights[t, k]).unsqueeze(0))[0]
            out[t] += self.down_proj[expert] @ hidden
    return out


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "fp8"])
def test_stored_weights_run_as_the_recipe_says(kind: str, official: Path, tmp_path: Path) -> None:
    checkpoint = stored_in(kind, official, tmp_path)
    model = oracle_of(checkpoint, tmp_path / "oracle")
    engine = start(
        checkpoint,
        dtype="float64",
        chunk_tokens=50,
        concurrency=1,
        context=256,
        prefix_cache=False,
        layouts=STORED,
    )
    chosen = {key: op.impl for key, op in engine.resolved.plan.ops.items()}  # type: ignore[union-attr]
    assert chosen["linear.wq_b@chunk"] == "linear/recipe", chosen
    record = Recorder().attach(engine)
    for prompt in prompts(17, (3, 40, 120)):
        got, wanted = scored(engine, record, prompt), v4.oracle(model, prompt)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)
        plain = start_dense(checkpoint) if len(prompt) == 40 else None
        if plain is not None:  # rounding is felt: the same weights without it say something else
            other = scored(plain, Recorder().attach(plain), prompt)
            assert (other - wanted).abs().max() > 1e-4


def start_dense(checkpoint: Path) -> Any:
    layouts = {**STORED, "weight": "dense@1", "experts": "experts-dense@1"}
    return start(
        checkpoint, dtype="float64", chunk_tokens=256, concurrency=1, context=256,
        prefix_cache=False, layouts=layouts,
    )  # fmt: skip
