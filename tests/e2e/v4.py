"""A tiny DeepSeek-V4 of every layer type in `transformers`: the oracle, and its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TINY: dict[str, Any] = {
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
    "compress_rate_hca": 16,  # so that short prompts close such windows
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
    # Sixteen index heads: with few of them all relus of an entry are often off, entries tie at
    # exactly 0, and torch.topk breaks ties by the length of the row (reference, section 8).
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
    "initializer_range": 0.2,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tiny(seed: int, **changes: Any) -> Any:
    """A float32 model whose parameters all matter: what the initialiser leaves trivial is drawn."""
    import torch
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(seed)
    config = DeepseekV4Config(**{**TINY, **changes}, attn_implementation="eager")
    config._experts_implementation = "eager"
    model = DeepseekV4ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith(("position_bias", "sinks", "base")):
                parameter.copy_(0.5 * noise)
            elif name.endswith("scale"):
                parameter.copy_(0.5 + 0.1 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                rows = [torch.randperm(config.n_routed_experts) for _ in range(config.vocab_size)]
                buffer.copy_(torch.stack(rows)[:, : buffer.shape[1]])
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    return model


def save(model: Any, folder: Path) -> Any:
    """The checkpoint in float32; the model itself in float64."""
    model.save_pretrained(folder)
    return model.double()


def oracle(model: Any, ids: list[int]) -> Any:
    """Logits [T, V] of `transformers` in real float64.

    Its code takes norms, streams, router and gates in float32 whatever the model's type, which
    leaves an error of 1e-5; here it keeps float64. Rotary angles stay float32 as in the publisher's
    code, with the publisher's frequencies: YaRN's blend is written in another order there, and
    one bit of a frequency is 1e-5 radians at position 300.
    """
    import torch
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    from metainfer.models.deepseek_v4.angles import frequencies
    from metainfer.models.deepseek_v4.config import read_arch

    arch = read_arch(model.config.to_dict())
    rotary = model.model.rotary_emb
    rotary.compress_inv_freq = frequencies(arch.rope_dim, arch.compress_theta, arch.yarn)
    with torch.inference_mode(), _kept_float64(modeling):
        return model(torch.tensor([ids])).logits[0]


class _Wide:
    """`torch` as a module's global, with float64 in float32's place."""

    def __init__(self, torch: Any) -> None:
        self._torch, self.float32 = torch, torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


@contextmanager
def _kept_float64(modeling: Any) -> Iterator[None]:
    """Inside, `modeling` narrows nothing to float32, except in the rotary embedding."""
    torch, rotary = modeling.torch, modeling.DeepseekV4RotaryEmbedding
    narrow, forward = torch.Tensor.float, rotary.forward

    def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if self.dtype == torch.float64 else narrow(self, *args, **kwargs)

    def turned(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.Tensor.float = narrow
        try:
            return forward(self, *args, **kwargs)
        finally:
            torch.Tensor.float = kept

    torch.Tensor.float, rotary.forward, modeling.torch = kept, turned, _Wide(torch)
    try:
        yield
    finally:
        torch.Tensor.float, rotary.forward, modeling.torch = narrow, forward, torch


def save_with_mtp(model: Any, folder: Path, seed: int) -> dict[str, Any]:
    """The checkpoint in float32 under the publisher's names, with a draft layer; its tensors."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    from metainfer.models.deepseek_v4.config import read_arch
    from metainfer.models.deepseek_v4.names import official

    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {official(name) or name: data for name, data in load_file(file).items()}
    arch = read_arch(json.loads((folder / "config.json").read_text())).with_draft()
    generator = torch.Generator().manual_seed(seed)
    for spec in (*arch.packed_weights(), *arch.plain_weights()):
        for name, shape in zip(spec.tensors, spec.tensor_shapes(), strict=True):
            if name.startswith("mtp."):
                noise = torch.randn(shape, generator=generator)
                tensors[name] = 1 + 0.2 * noise if "norm" in name else 0.2 * noise
    save_file(tensors, file)
    return tensors
