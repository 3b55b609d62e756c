"""Stored names of a DeepSeek-V4 checkpoint in the publisher's own spelling. No torch.

Three spellings are read: the publisher's; Hugging Face's modules (``model.layers.0.self_attn.
q_a_proj``, experts fused in ``gate_up_proj [E, 2F, D]`` with the gate's rows first, and
``down_proj [E, D, F]``); and what transformers' ``save_pretrained`` writes, which is the
publisher's behind ``model.``, with ``attn.norm`` for ``attn.kv_norm`` and the embedding and the
last streams' mix in Hugging Face's. A slice of a fused tensor is contiguous, so it is a
`TensorInfo` of its own with another offset. A fused name declares its order, and one that says up
first is refused; gate and up written the wrong way round under right names have the same shapes and
statistics, and no header shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from metainfer.formats.completeness import Names
from metainfer.formats.index import TensorInfo
from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch
from metainfer.models.deepseek_v4.drafts import Draft, DraftKind, draft_shapes, find_draft

_TOP = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}
# Modules inside a layer; what follows one (``.weight``, ``.weight_scale_inv``) stays.
_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attn.norm": "attn.kv_norm",
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_a_norm": "attn.q_norm",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_proj": "attn.wkv",
    "self_attn.kv_norm": "attn.kv_norm",
    "self_attn.o_a_proj": "attn.wo_a",
    "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.compressor.kv_proj": "attn.compressor.wkv",
    "self_attn.compressor.gate_proj": "attn.compressor.wgate",
    "self_attn.compressor.kv_norm": "attn.compressor.norm",
    "self_attn.compressor.indexer.kv_proj": "attn.indexer.compressor.wkv",
    "self_attn.compressor.indexer.gate_proj": "attn.indexer.compressor.wgate",
    "self_attn.compressor.indexer.kv_norm": "attn.indexer.compressor.norm",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    "mlp.gate": "ffn.gate",
}
_PARAMETERS = {
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    **{
        f"{part}_hc.{leaf}": f"hc_{part}_{leaf}"
        for part in ("attn", "ffn")
        for leaf in ("fn", "base", "scale")
    },
}
_OFFICIAL = re.compile(r"(embed|head|norm)\.\w+$|hc_head_\w+$|(layers|mtp)\.\d+\.")
_LAYER = re.compile(r"(layers\.\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.(experts\.\d+|shared_experts)\.(gate|up|down)_proj(\..+)")
_FUSED = re.compile(
    r"(layers\.\d+)\.mlp\.experts\.([a-z]\w*?)(_scale_inv|\.weight_scale_inv|\.weight)?"
)
_WHICH = {"gate": "w1", "up": "w3", "down": "w2"}
_REVERSED = ("up_gate_proj", "w3_w1", "w31")


def official(name: str) -> str | None:
    """The publisher's name of stored tensor `name`, or None where it has none.

    Fused experts are no single tensor of the publisher's and have none.
    """
    bare = name.removeprefix("model.")
    if bare in _TOP:
        return _TOP[bare]
    layer = _LAYER.fullmatch(bare)
    if layer is not None:
        prefix, rest = layer.groups()
        if rest in _PARAMETERS:
            return f"{prefix}.{_PARAMETERS[rest]}"
        stem, dot, leaf = rest.rpartition(".")
        if stem in _MODULES and (stem != "attn.norm" or bare != name):
            return f"{prefix}.{_MODULES[stem]}{dot}{leaf}"
        expert = _EXPERT.fullmatch(rest)
        if expert is not None:
            where, which, leaf = expert.groups()
            return f"{prefix}.ffn.{where}.{_WHICH[which]}{leaf}"
        if re.match(r"(self_attn|mlp)\.", rest):
            return None
    return bare if _OFFICIAL.match(bare) else None


def checkpoint_names(
    arch: DeepSeekV4Arch,
    config: Mapping[str, object],
    tensors: Mapping[str, TensorInfo],
    block: tuple[int, int] | None,
) -> Names:
    """`resolve_names`; a draft's tensors (``mtp.*``) are optional, their shapes checked."""
    found = resolve_names(tensors, block)
    drafted = [name for name in found.tensors if name.startswith("mtp.")]
    draft = find_draft(arch, drafted)
    shapes: Mapping[str, tuple[int, ...]] = {}
    if draft is not None:
        layers, rank = config.get("dspark_target_layer_ids"), config.get("dspark_markov_rank")
        shapes = draft_shapes(
            arch,
            draft,
            tapped=len(layers) if isinstance(layers, (list, tuple)) else 3,
            rank=rank if isinstance(rank, int) else 256,
        )
        found.drafts = draft == Draft(DraftKind.MTP, 1)
    found.optional = {name: shapes.get(name, ()) for name in drafted}
    return found


def resolve_names(tensors: Mapping[str, TensorInfo], block: tuple[int, int] | None = None) -> Names:
    """Every stored tensor under the publisher's name.

    `block`: that of FP8 weights, which fused scales are cut by.
    """
    found = Names()
    for name, info in tensors.items():
        fused = _FUSED.fullmatch(name.removeprefix("model."))
        if fused is not None:
            _cut_experts(found, info, fused, tensors, block)
            continue
        known = official(name)
        if known is None:
            found.unknown.append(name)
        else:
            found.add(known, info)
    return found


def _cut_experts(
    found: Names,
    info: TensorInfo,
    fused: re.Match[str],
    tensors: Mapping[str, TensorInfo],
    block: tuple[int, int] | None,
) -> None:
    """The experts of one fused tensor: ``gate_up_proj``, ``down_proj`` or their scales."""
    layer, leaf, suffix = fused.groups(default="")
    experts = f"{layer}.ffn.experts."
    if leaf not in ("gate_up_proj", "down_proj", *_REVERSED):
        found.unknown.append(info.name)
        return
    scaled, message = "scale_inv" in suffix, ""
    parts = (("w1", 0), ("w3", 1)) if leaf == "gate_up_proj" else (("w2", 0),)
    rows = info.shape[1] if len(info.shape) == 3 else -1
    if leaf in _REVERSED:
        message = (
            f"{info.name} declares the rows of w3 (up) before those of w1 (gate); "
            "gate_up_proj, the gate first, is read"
        )
    elif rows < 0 or rows % len(parts):
        halves = ", the rows in two halves" if len(parts) == 2 else ""
        message = f"{_told(info)} needs [experts, rows, columns]{halves}"
    elif scaled and len(parts) == 2 and block is not None:
        weight = tensors.get(info.name.replace(suffix, ""))
        if weight is not None and weight.scheme == "F8_E4M3" and weight.shape[1] % (2 * block[0]):
            message = (
                f"{_told(info)}: the {weight.shape[1] // 2} rows of a gate are not whole blocks "
                f"of {block[0]}, so one scale would serve gate and up"
            )
    if message:
        found.wrong(message, info.name)
        found.excused.append(experts)
        return
    per, kind = rows // len(parts), "weight_scale_inv" if scaled else "weight"
    for expert in range(info.shape[0]):
        for which, half in parts:
            found.add(f"{experts}{expert}.{which}.{kind}", _rows_of(info, expert, half * per, per))


def _rows_of(info: TensorInfo, expert: int, start: int, count: int) -> TensorInfo:
    """Rows of one expert of [E, N, K]: a contiguous piece."""
    _, rows, columns = info.shape
    each = info.nbytes // prod(info.shape[:2]) if info.nbytes else 0
    return TensorInfo(
        name=f"{info.name}[{expert}, {start}:{start + count}]",
        scheme=info.scheme,
        shape=(count, columns),
        nbytes=count * each,
        file=info.file,
        offset=info.offset + (expert * rows + start) * each,
    )


def _told(info: TensorInfo) -> str:
    return f"{info.name} {info.scheme} {list(info.shape)}"
