"""The weights of one DeepSeek-V4 layer, by the names that the model's formulas use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch, LayerKind
from metainfer.models.deepseek_v4.weights import MTP
from metainfer.ops.linear.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class Compressor:
    """`ape` [ratio, C]: learned bias of the gates by place in the window; `norm` [d]."""

    ape: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """`attn_site`, `ffn_site`: fn, base, scale and norm weight of a hyper-connection's site.

    `compress` joins what projects x in float32: values and gates of the entries, with an indexer
    also those of its keys and its head weights (`compress_rows` are their widths).
    """

    number: int
    ratio: int
    attn_op: str
    compress_op: str
    cos_sin: Tensor  # [M, R]
    attn_site: tuple[Tensor, ...]
    wqkv: PackedWeight  # [q_rank + d, D]
    q_norm: Tensor  # [q_rank]
    kv_norm: Tensor  # [d]
    wq_b: PackedWeight  # [H d, q_rank]
    sinks: Tensor  # [H]
    compress: PackedWeight | None
    compress_rows: tuple[int, ...]
    entry: Compressor | None
    index: Compressor | None
    index_q: PackedWeight | None  # [heads * index_dim, q_rank]
    wo_a: PackedWeight  # [G o_rank, H d / G]
    wo_b: PackedWeight  # [D, G o_rank]
    ffn_site: tuple[Tensor, ...]
    gate: Tensor  # [E, D]
    bias: Tensor | None  # [E]
    by_token: Tensor | None  # [V, k], experts of each token id
    w13: PackedWeight  # [E 2 F, D]
    w2: PackedWeight  # [E D, F]
    shared13: PackedWeight  # [2 F, D]
    shared2: PackedWeight  # [D, F]


def read_layer(
    arch: DeepSeekV4Arch,
    layer: int,
    packed: Mapping[str, PackedWeight],
    plain: Mapping[str, Tensor],
    tables: tuple[Tensor, Tensor],
) -> Layer:
    """`tables`: the rotary tables of plain layers, and of those that compress. Layer `arch.layers`
    is the draft's."""
    kind, ratio, prefix = LayerKind.WINDOW, 0, MTP
    if layer < arch.layers:
        kind, ratio, prefix = arch.kinds[layer], arch.ratio(layer), f"layers.{layer}."

    def small(name: str) -> Tensor | None:
        return plain.get(prefix + name)

    def site(part: str) -> tuple[Tensor, ...]:
        leaves = [f"hc_{part}_{leaf}" for leaf in ("fn", "base", "scale")]
        return tuple(plain[prefix + leaf] for leaf in (*leaves, f"{part}_norm"))

    def compressor(name: str) -> Compressor | None:
        ape, norm = small(f"{name}ape"), small("compress_norm" if not name else f"{name}norm")
        return None if ape is None or norm is None else Compressor(ape, norm)

    def matrix(name: str) -> PackedWeight:
        return packed[prefix + name]

    return Layer(
        number=layer,
        ratio=ratio,
        attn_op=f"attn_sparse.{kind.value}",
        compress_op=f"compress.{kind.value}",
        cos_sin=tables[1 if ratio else 0],
        attn_site=site("attn"),
        wqkv=matrix("wqkv"),
        q_norm=plain[f"{prefix}q_norm"],
        kv_norm=plain[f"{prefix}kv_norm"],
        wq_b=matrix("wq_b"),
        sinks=plain[f"{prefix}sinks"],
        compress=packed.get(f"{prefix}compress"),
        compress_rows=_compress_rows(arch, kind),
        entry=compressor(""),
        index=compressor("index_"),
        index_q=packed.get(f"{prefix}index_q"),
        wo_a=matrix("wo_a"),
        wo_b=matrix("wo_b"),
        ffn_site=site("ffn"),
        gate=plain[f"{prefix}gate"],
        bias=small("gate_bias"),
        by_token=small("tid2eid"),
        w13=matrix("w13"),
        w2=matrix("w2"),
        shared13=matrix("shared13"),
        shared2=matrix("shared2"),
    )


def _compress_rows(arch: DeepSeekV4Arch, kind: LayerKind) -> tuple[int, ...]:
    if kind is LayerKind.CSA:
        key = 2 * arch.index_dim
        return (2 * arch.head_dim, 2 * arch.head_dim, key, key, arch.index_heads)
    return (arch.head_dim, arch.head_dim) if kind is LayerKind.HCA else ()
