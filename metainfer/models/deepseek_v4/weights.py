"""DeepSeek-V4's weights: which tensors the model reads, by their official names. No torch.

Names, shapes and fusions are those of the published files (`formats` maps other spellings onto
them): attention ``wq_a`` and ``wkv`` are one product, so are both compressors of a layer with the
indexer's head weights, and w1 with w3 of every expert. Sites are those of the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from metainfer.models.arch import EXACT, WeightSpec

if TYPE_CHECKING:
    from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch

MTP = "mtp.0."
"""Where the publisher's files keep the one draft layer of the April release."""


@lru_cache(maxsize=8)
def packed_weights(arch: DeepSeekV4Arch) -> tuple[WeightSpec, ...]:
    """Matrices that go through a weight layout, in the order in which the files hold them.

    Names: ``embed``, ``lm_head``, and per layer ``wqkv wq_b wo_a wo_b compress index_q w13 w2
    shared13 shared2`` behind ``layers.{i}.``. ``w13`` holds w1 then w3 of each expert in turn.
    """
    vocab = (arch.vocab_size, arch.hidden)
    found = [WeightSpec("embed", "embed", ("embed.weight",), vocab)]
    for layer in range(arch.layers):
        found += _attention(arch, layer)
        found += _experts(arch, layer)
    found.append(WeightSpec("lm_head", "linear.lm_head", ("head.weight",), vocab))
    if arch.mtp:
        found += _mtp_block(arch, packed_weights)
        square = (arch.hidden, arch.hidden)
        for part in ("e_proj", "h_proj"):
            key, tensors = f"{MTP}{part}", (f"{MTP}{part}.weight",)
            found.append(WeightSpec(key, f"linear.mtp_{part[0]}", tensors, square, (), arch.layers))
    return tuple(found)


def _mtp_block(
    arch: DeepSeekV4Arch, of: Callable[[DeepSeekV4Arch], tuple[WeightSpec, ...]]
) -> list[WeightSpec]:
    """A layer without compression, routed by scores, under the draft's names."""
    one = replace(arch, layers=1, kinds=(type(arch.kinds[0])("window"),), hash_layers=0, mtp=False)
    return [
        replace(
            spec,
            name=spec.name.replace("layers.0.", MTP),
            tensors=tuple(name.replace("layers.0.", MTP) for name in spec.tensors),
            layer=arch.layers,
        )
        for spec in of(one)
        if spec.layer == 0
    ]


def _matrix(
    layer: int, name: str, site: str, parts: Iterable[tuple[str, int]], width: int, role: str
) -> WeightSpec:
    """`parts`: (tensor without ``layers.{i}.`` and ``.weight``, its rows)."""
    listed = tuple(parts)
    rows = tuple(count for _, count in listed)
    return WeightSpec(
        name=f"layers.{layer}.{name}",
        site=site,
        tensors=tuple(f"layers.{layer}.{part}.weight" for part, _ in listed),
        shape=(sum(rows), width),
        layer=layer,
        rows=rows,
        role=role,
    )


def _attention(arch: DeepSeekV4Arch, layer: int) -> list[WeightSpec]:
    hidden, queries = arch.hidden, arch.heads * arch.head_dim
    groups = arch.o_groups * arch.o_rank

    def matrix(name: str, site: str, parts: Iterable[tuple[str, int]], width: int) -> WeightSpec:
        return _matrix(layer, name, site, [(f"attn.{p}", n) for p, n in parts], width, "weight")

    found = [
        matrix("wqkv", "linear.wqkv", [("wq_a", arch.q_rank), ("wkv", arch.head_dim)], hidden),
        matrix("wq_b", "linear.wq_b", [("wq_b", queries)], arch.q_rank),
    ]
    ratio, indexed = arch.ratio(layer), arch.kinds[layer] == "csa"
    if ratio:
        width = _entry_width(arch, indexed)
        parts = [("compressor.wkv", width), ("compressor.wgate", width)]
        if indexed:
            key = 2 * arch.index_dim
            parts += [
                ("indexer.compressor.wkv", key),
                ("indexer.compressor.wgate", key),
                ("indexer.weights_proj", arch.index_heads),
            ]
        site = "linear_f32.csa" if indexed else "linear_f32.hca"
        found.append(matrix("compress", site, parts, hidden))
    if indexed:
        rows = arch.index_heads * arch.index_dim
        found.append(matrix("index_q", "linear.index_q", [("indexer.wq_b", rows)], arch.q_rank))
    found.append(matrix("wo_a", "out_group", [("wo_a", groups)], queries // arch.o_groups))
    found.append(matrix("wo_b", "linear.wo_b", [("wo_b", hidden)], groups))
    return found


def _entry_width(arch: DeepSeekV4Arch, overlap: bool) -> int:
    """Channels of a compressor's raw rows: windows that overlap keep two halves."""
    return arch.head_dim * (2 if overlap else 1)


def _experts(arch: DeepSeekV4Arch, layer: int) -> list[WeightSpec]:
    hidden, ffn = arch.hidden, arch.ffn
    each = [f"ffn.experts.{expert}" for expert in range(arch.experts)]
    shared = "ffn.shared_experts"
    pairs = [(f"{expert}.{w}", ffn) for expert in each for w in ("w1", "w3")]
    downs = [(f"{expert}.w2", hidden) for expert in each]
    return [
        _matrix(layer, "w13", "experts.w13", pairs, hidden, "experts"),
        _matrix(layer, "w2", "experts.w2", downs, ffn, "experts"),
        _matrix(
            layer, "shared13", "linear.shared13",
            [(f"{shared}.w1", ffn), (f"{shared}.w3", ffn)], hidden, "weight",
        ),
        _matrix(layer, "shared2", "linear.shared2", [(f"{shared}.w2", hidden)], ffn, "weight"),
    ]  # fmt: skip


@lru_cache(maxsize=8)
def plain_weights(arch: DeepSeekV4Arch) -> tuple[WeightSpec, ...]:
    """Small parameters, each in its own dtype (`WeightSpec.dtype`; empty is the model's).

    Per layer, behind ``layers.{i}.``: ``attn_norm ffn_norm q_norm kv_norm`` in the model's dtype;
    ``sinks [Hq]``, ``hc_attn_fn [(2 + N) N, N D]``, ``hc_attn_base``, ``hc_attn_scale [3]``,
    ``hc_ffn_*`` in float32, ``gate [E, D]`` in float32 or narrower as it is stored; ``gate_bias
    [E]`` float32, or ``tid2eid [V, k]`` int64 in layers routed by token id; where the layer
    compresses ``ape [ratio, C]`` and ``compress_norm [D_h]``, with an index ``index_ape`` and
    ``index_norm`` too, all float32.
    At the end: ``norm``, ``hc_head_fn [N, N D]``, ``hc_head_base [N]``, ``hc_head_scale [1]``.
    """
    found: list[WeightSpec] = []
    for layer in range(arch.layers):
        found += _small(arch, layer)
    found += _ending(arch, "", -1)
    if arch.mtp:
        found += _mtp_block(arch, plain_weights)
        found += _ending(arch, MTP, arch.layers)
        for part in ("enorm", "hnorm"):
            key, tensors = f"{MTP}{part}", (f"{MTP}{part}.weight",)
            found.append(WeightSpec(key, "rmsnorm", tensors, (arch.hidden,), (), arch.layers))
    return tuple(found)


def _ending(arch: DeepSeekV4Arch, prefix: str, layer: int) -> list[WeightSpec]:
    """What collapses the streams behind the last layer, and the norm before the head."""
    streams, wide = arch.streams, arch.streams * arch.hidden
    found = [WeightSpec(f"{prefix}norm", "rmsnorm", (f"{prefix}norm.weight",), (arch.hidden,))]
    for leaf, shape in (("fn", (streams, wide)), ("base", (streams,)), ("scale", (1,))):
        name = f"{prefix}hc_head_{leaf}"
        found.append(WeightSpec(name, "hyper_head", (name,), shape, dtype="float32"))
    return [replace(spec, layer=layer) for spec in found]


def _small(arch: DeepSeekV4Arch, layer: int) -> list[WeightSpec]:
    found: list[WeightSpec] = []

    def add(name: str, site: str, tensor: str, shape: tuple[int, ...], dtype: str = "") -> None:
        key, tensors = f"layers.{layer}.{name}", (f"layers.{layer}.{tensor}",)
        found.append(WeightSpec(key, site, tensors, shape, (), layer, dtype=dtype))

    streams, wide = arch.streams, arch.streams * arch.hidden
    mixes = streams * (2 + streams)
    for part in ("attn", "ffn"):
        add(f"{part}_norm", "rmsnorm", f"{part}_norm.weight", (arch.hidden,))
        for leaf, shape in (("fn", (mixes, wide)), ("base", (mixes,)), ("scale", (3,))):
            add(f"hc_{part}_{leaf}", "hyper_pre", f"hc_{part}_{leaf}", shape, "float32")
    add("q_norm", "rmsnorm", "attn.q_norm.weight", (arch.q_rank,))
    add("kv_norm", "latent_qkv", "attn.kv_norm.weight", (arch.head_dim,))
    add("sinks", "attn_sparse", "attn.attn_sink", (arch.heads,), "float32")
    ratio, indexed = arch.ratio(layer), arch.kinds[layer] == "csa"
    if ratio:
        shape = (ratio, _entry_width(arch, indexed))
        add("ape", "compress", "attn.compressor.ape", shape, "float32")
        norm = "attn.compressor.norm.weight"
        add("compress_norm", "compress", norm, (arch.head_dim,), "float32")
    if indexed:
        inner = "attn.indexer.compressor"
        add("index_ape", "compress_index", f"{inner}.ape", (ratio, 2 * arch.index_dim), "float32")
        width = (arch.index_dim,)
        add("index_norm", "compress_index", f"{inner}.norm.weight", width, "float32")
    add("gate", "moe_route", "ffn.gate.weight", (arch.experts, arch.hidden), EXACT)
    if layer < arch.hash_layers:
        table = (arch.vocab_size, arch.experts_per_token)
        add("tid2eid", "moe_route_hash", "ffn.gate.tid2eid", table, "int64")
    else:
        add("gate_bias", "moe_route", "ffn.gate.bias", (arch.experts,), "float32")
    return found
