"""Which tensors these models read, by the names of their files. No torch.

The two down projections of attention are one product, so are gate and up of every FFN.
``kv_b_proj`` is held as two halves in the model's type, by which queries go into the latent and
results come out of it: a block of its scales straddles the two, so it is widened at load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from metainfer.models.arch import WeightSpec

if TYPE_CHECKING:
    from metainfer.models.dsa.arch import DsaArch


def _layers(arch: DsaArch) -> int:
    """Layers with weights: the draft's has the index behind the last."""
    return arch.layers + int(arch.mtp)


@lru_cache(maxsize=8)
def packed_weights(arch: DsaArch) -> tuple[WeightSpec, ...]:
    """Matrices that go through a weight layout, in the order of the files.

    Names: ``embed``, ``lm_head``, and per layer ``qkv_a q_b o``, with an indexer ``index_q index_k
    index_w``, then ``gate_up down`` or ``w13 w2 shared13 shared2``; ``mtp_eh`` of the draft layer.
    """
    vocab = (arch.vocab_size, arch.hidden)
    found = [WeightSpec("embed", "embed", ("model.embed_tokens.weight",), vocab)]
    for layer in range(_layers(arch)):
        found += _attention(arch, layer)
        found += _dense(arch, layer) if layer < arch.dense_layers else _experts(arch, layer)
    if arch.mtp:
        parts = [("eh_proj", arch.hidden)]
        found.append(_matrix(arch.layers, "mtp_eh", "linear.mtp_eh", parts, 2 * arch.hidden))
    found.append(WeightSpec("lm_head", "linear.lm_head", ("lm_head.weight",), vocab))
    return tuple(found)


def _matrix(
    layer: int, name: str, site: str, parts: Iterable[tuple[str, int]], width: int
) -> WeightSpec:
    """`parts`: (tensor without its layer and ``.weight``, its rows)."""
    listed = tuple(parts)
    rows = tuple(count for _, count in listed)
    return WeightSpec(
        name=f"layers.{layer}.{name}",
        site=site,
        tensors=tuple(f"model.layers.{layer}.{part}.weight" for part, _ in listed),
        shape=(sum(rows), width),
        layer=layer,
        rows=rows,
    )


def _attention(arch: DsaArch, layer: int) -> list[WeightSpec]:
    attn = "self_attn"
    down = [(f"{attn}.q_a_proj", arch.q_rank), (f"{attn}.kv_a_proj_with_mqa", arch.latent)]
    queries = [(f"{attn}.q_b_proj", arch.heads * (arch.nope + arch.rope_dim))]
    found = [
        _matrix(layer, "qkv_a", "linear.qkv_a", down, arch.hidden),
        _matrix(layer, "q_b", "linear.q_b", queries, arch.q_rank),
        _matrix(layer, "o", "linear.o", [(f"{attn}.o_proj", arch.hidden)], arch.heads * arch.v_dim),
    ]
    if layer >= arch.layers or arch.full[layer]:
        inner, rows = f"{attn}.indexer", arch.index_heads * arch.index_dim
        key, head = [(f"{inner}.wk", arch.index_dim)], [(f"{inner}.weights_proj", arch.index_heads)]
        found += [
            _matrix(layer, "index_q", "linear.index_q", [(f"{inner}.wq_b", rows)], arch.q_rank),
            _matrix(layer, "index_k", "linear.index_k", key, arch.hidden),
            _matrix(layer, "index_w", "linear_f32.index_w", head, arch.hidden),
        ]
    return found


def _dense(arch: DsaArch, layer: int) -> list[WeightSpec]:
    both = [(f"mlp.{part}_proj", arch.dense_ffn) for part in ("gate", "up")]
    down = [("mlp.down_proj", arch.hidden)]
    return [
        _matrix(layer, "gate_up", "linear.gate_up", both, arch.hidden),
        _matrix(layer, "down", "linear.down", down, arch.dense_ffn),
    ]


def _experts(arch: DsaArch, layer: int) -> list[WeightSpec]:
    hidden, ffn, shared = arch.hidden, arch.ffn, "mlp.shared_experts"
    each = [f"mlp.experts.{expert}" for expert in range(arch.experts)]
    pairs = [(f"{expert}.{part}_proj", ffn) for expert in each for part in ("gate", "up")]
    downs = [(f"{expert}.down_proj", hidden) for expert in each]
    wide = ffn * arch.shared_experts
    both = [(f"{shared}.{part}_proj", wide) for part in ("gate", "up")]
    return [
        replace(_matrix(layer, "w13", "experts.w13", pairs, hidden), role="experts"),
        replace(_matrix(layer, "w2", "experts.w2", downs, ffn), role="experts"),
        _matrix(layer, "shared13", "linear.shared13", both, hidden),
        _matrix(layer, "shared2", "linear.shared2", [(f"{shared}.down_proj", hidden)], wide),
    ]


@lru_cache(maxsize=8)
def plain_weights(arch: DsaArch) -> tuple[WeightSpec, ...]:
    """Parameters that stay as they are, each in its own dtype (`WeightSpec.dtype`; empty is the
    model's): norms, ``absorb [H (d_n + d_v), r]``; float32 ``gate [E, D]``, ``gate_bias [E]``.
    """
    found: list[WeightSpec] = []
    for layer in range(_layers(arch)):
        found += _small(arch, layer)
    if arch.mtp:
        for part in ("enorm", "hnorm", "shared_head.norm"):
            found.append(_plain(arch.layers, part, "rmsnorm", f"{part}.weight", (arch.hidden,)))
    found.append(WeightSpec("norm", "rmsnorm", ("model.norm.weight",), (arch.hidden,)))
    return tuple(found)


def _plain(
    layer: int, name: str, site: str, tensor: str, shape: tuple[int, ...], dtype: str = ""
) -> WeightSpec:
    tensors = (f"model.layers.{layer}.{tensor}",)
    return WeightSpec(f"layers.{layer}.{name}", site, tensors, shape, (), layer, dtype=dtype)


def _small(arch: DsaArch, layer: int) -> list[WeightSpec]:
    wide = (arch.heads * (arch.nope + arch.v_dim), arch.kv_rank)
    listed: list[tuple[str, str, str, tuple[int, ...], str]] = [
        ("attn_norm", "rmsnorm", "input_layernorm.weight", (arch.hidden,), ""),
        ("mlp_norm", "rmsnorm", "post_attention_layernorm.weight", (arch.hidden,), ""),
        ("q_norm", "rmsnorm", "self_attn.q_a_layernorm.weight", (arch.q_rank,), ""),
        ("kv_norm", "rmsnorm", "self_attn.kv_a_layernorm.weight", (arch.kv_rank,), ""),
        ("absorb", "absorb", "self_attn.kv_b_proj.weight", wide, ""),
    ]
    if layer >= arch.layers or arch.full[layer]:
        norm = "self_attn.indexer.k_norm"
        for leaf in ("weight", "bias"):
            name = f"index_norm_{leaf}"
            listed.append((name, "index_key", f"{norm}.{leaf}", (arch.index_dim,), ""))
    if layer >= arch.dense_layers:
        gate = (arch.experts, arch.hidden)
        bias = "mlp.gate.e_score_correction_bias"
        listed += [
            ("gate", "moe_route", "mlp.gate.weight", gate, "float32"),
            ("gate_bias", "moe_route", bias, (arch.experts,), "float32"),
        ]
    return [_plain(layer, *each) for each in listed]
