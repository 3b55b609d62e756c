"""What a low-precision checkpoint stores, checked against its configuration. No torch.

Every quantised weight is found by its stored dtype and the tensors beside it, and each dtype and
shape is compared with what the configuration implies. All that is wrong comes in one error, each
part naming the tensor and both shapes. Names: DeepSeek-V4's own (``X.scale`` stands beside
``X.weight``), Hugging Face's ``X.weight_scale_inv``, ModelOpt's and compressed-tensors'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from metainfer.core.errors import RefusedError
from metainfer.core.verdict import Reason
from metainfer.formats.blocks import (
    ELEMENT_DTYPES,
    FP8_ROW_32,
    MXFP4,
    NVFP4,
    NVFP4_COMPRESSED,
    SCALE_DTYPES,
    BlockFormat,
    fp8_block,
)
from metainfer.formats.index import TensorInfo

_EXPERT = re.compile(r"\.experts\.\d+\.")
#: What a config may call the experts' format; NVFP4 has keys of its own beside it.
EXPERTS = ("fp4", "fp8", "nvfp4")
_ENGRAM = ".engram.embed.weight"
_POWER_SCALES = ("scale", "weight_scale_inv")
_SCALE_LEAVES = (*_POWER_SCALES, "weight_scale", "weight_scale_2", "weight_global_scale")
INPUT_LEAVES = ("input_scale", "input_global_scale")


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """What ``quantization_config`` says. `experts`: ``fp4``, ``nvfp4`` or empty if not said.

    `ignored`: patterns of modules that are not in the experts' NVFP4.
    """

    block: tuple[int, int] | None = None
    experts: str = ""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised matrix of `shape` [N, K] and the names of the tensors that hold it."""

    name: str
    format: BlockFormat
    shape: tuple[int, int]
    data: str
    scale: str
    second: str = ""


def read_config(config: Mapping[str, Any]) -> QuantConfig:
    """The quantisation part of a model's config (also nested in ``text_config``)."""
    text = config.get("text_config", {})
    section = config.get("quantization_config") or text.get("quantization_config") or {}
    block = section.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list | tuple) and len(block) == 2 and all(_positive(b) for b in block)
    ):
        raise _refused([_wrong("config", f"weight_block_size is {block!r}, not two counts")])
    experts = section.get("expert_dtype") or config.get("expert_dtype") or ""
    wrong = [
        _wrong("config", f"{key} is {value!r}; known: {', '.join(known)}")
        for key, value, known in (
            ("expert_dtype", experts, EXPERTS), ("fmt", section.get("fmt"), ("e4m3",)),
            ("scale_fmt", section.get("scale_fmt"), ("ue8m0", "float")),
        )
        if value and value not in known
    ]  # fmt: skip
    if wrong:
        raise _refused(wrong)
    if str(section.get("moe_quant_algo", "")).upper() == "NVFP4":
        experts = "nvfp4"
        if section.get("group_size", 16) != 16:
            raise _refused([_wrong("config", f"NVFP4 group_size is {section['group_size']!r}")])
    ignored = section.get("ignore") or section.get("exclude_modules") or ()
    return QuantConfig(tuple(block) if block else None, str(experts), tuple(map(str, ignored)))


def find_weights(
    config: QuantConfig,
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, StoredWeight]:
    """The quantised matrices by the name of their weight (``X.weight``), all checked.

    `expected`: logical [N, K] by name, from the model's architecture; tensors named there must
    exist, quantised or not. Raises `RefusedError` (``bad_checkpoint``) with every objection.
    """
    found, wrong = examine(config, tensors, expected)
    if wrong:
        raise _refused(wrong)
    return found


def examine(
    config: QuantConfig,
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[dict[str, StoredWeight], list[Reason]]:
    """What `find_weights` finds, and its objections as data."""
    found: dict[str, StoredWeight] = {}
    wrong: list[Reason] = []
    claimed: set[str] = set()
    for name, info in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if leaf not in ("weight", "weight_packed") or info.scheme not in ("F8_E4M3", "I8", "U8"):
            continue
        weight = f"{stem}.weight" if stem else "weight"
        logical = (expected or {}).get(weight)
        stored, reasons = _examine(weight, name, info, config, tensors, logical)
        wrong += reasons
        if stored is not None:
            found[weight] = stored
            claimed |= {stored.data, stored.scale, stored.second}
    wrong += _strays(tensors, claimed, {reason.data.get("scale") for reason in wrong})
    for name, shape in (expected or {}).items():
        if name not in found and not any(reason.data.get("tensor") == name for reason in wrong):
            wrong += _dense(name, shape, tensors)
    return found, wrong


def _examine(
    weight: str,
    name: str,
    info: TensorInfo,
    config: QuantConfig,
    tensors: Mapping[str, TensorInfo],
    logical: tuple[int, int] | None,
) -> tuple[StoredWeight | None, list[Reason]]:
    fmt, reasons = _format(weight, info, config, tensors)
    if fmt is None:
        return None, reasons
    scale = fmt.leaf(weight, fmt.scale_leaf)
    second = fmt.leaf(weight, fmt.second_leaf) if fmt.second_leaf else ""
    stored_shape = info.shape
    if len(stored_shape) != 2:
        return None, [_wrong(weight, f"{_told(info)} is not a matrix")]
    shape = fmt.logical_shape(stored_shape) if logical is None else logical
    for part, wanted, dtypes in (
        (name, fmt.data_shape(*shape), ELEMENT_DTYPES[fmt.element]),
        (scale, fmt.scale_shape(*shape), SCALE_DTYPES[fmt.scale]),
    ):
        if tensors[part].shape != wanted or tensors[part].scheme not in dtypes:
            needs = f"a {list(shape)} matrix needs {' or '.join(dtypes)} {list(wanted)}"
            reasons.append(_wrong(weight, f"{_told(tensors[part])} where {needs}", part))
    for one in (second, *(fmt.leaf(weight, leaf) for leaf in INPUT_LEAVES)):
        if one in tensors and not (
            tensors[one].scheme == "F32" and tensors[one].shape in ((), (1,))
        ):
            reasons.append(_wrong(weight, f"{_told(tensors[one])} needs to be one F32 number"))
    return StoredWeight(weight, fmt, shape, name, scale, second), reasons


def _format(
    weight: str, info: TensorInfo, config: QuantConfig, tensors: Mapping[str, TensorInfo]
) -> tuple[BlockFormat | None, list[Reason]]:
    """The format of one stored weight, and objections to it."""
    stem = weight.rpartition("weight")[0]
    power = next((leaf for leaf in _POWER_SCALES if stem + leaf in tensors), "")
    fp4 = info.scheme != "F8_E4M3"
    is_expert = bool(_EXPERT.search(weight))
    if fp4 and info.name.endswith("weight_packed"):
        fmt = NVFP4_COMPRESSED
    elif fp4 and stem + "weight_scale" in tensors:
        fmt = NVFP4
    elif fp4:
        fmt = replace(MXFP4, scale_leaf=power)
    else:
        return _fp8(weight, power, info, config, tensors)
    needed = [leaf for leaf in (fmt.scale_leaf or "scale", fmt.second_leaf) if leaf]
    missing = [stem + leaf for leaf in needed if stem + leaf not in tensors]
    if missing:
        return None, [_wrong(weight, f"{_told(info)} has no {' and no '.join(missing)}")]
    reasons = []
    ignored = any(fnmatchcase(weight, p) or fnmatchcase(stem[:-1], p) for p in config.ignored)
    if fmt.second != "none" and ignored:
        reasons.append(_wrong(weight, f"{_told(info)} is NVFP4 but the config ignores it"))
    if fmt.second == "none" and is_expert and config.experts == "nvfp4" and not ignored:
        reasons.append(_wrong(weight, f"{_told(info)} is MXFP4 where the config says NVFP4"))
    if is_expert and config.experts == "fp8":
        reasons.append(_wrong(weight, f"{_told(info)} is FP4 where the config says fp8"))
    return fmt, reasons


def _fp8(
    weight: str,
    power: str,
    info: TensorInfo,
    config: QuantConfig,
    tensors: Mapping[str, TensorInfo],
) -> tuple[BlockFormat | None, list[Reason]]:
    stem = weight.rpartition("weight")[0]
    if not power:
        return None, [_wrong(weight, f"{_told(info)} has no {stem}scale")]
    if weight.endswith(_ENGRAM):
        return replace(FP8_ROW_32, scale_leaf=power), []
    if config.block is None:
        return None, [_wrong(weight, f"{_told(info)} but the config has no weight_block_size")]
    scale = "F32" if tensors[stem + power].scheme == "F32" else "F8_E8M0"
    reasons = []
    if config.experts in ("fp4", "nvfp4") and _EXPERT.search(weight):
        reasons.append(_wrong(weight, f"{_told(info)} where the config says {config.experts}"))
    return replace(fp8_block(config.block, scale), scale_leaf=power), reasons


def _strays(
    tensors: Mapping[str, TensorInfo], claimed: set[str], told: Iterable[object]
) -> list[Reason]:
    """Scales whose weight is not quantised, or not there."""
    known = {str(name) for name in told}
    reasons = []
    for name, info in tensors.items():
        stem, _, leaf = name.rpartition(".")
        weight = f"{stem}.weight"
        if leaf not in _SCALE_LEAVES or name in claimed or weight in known:
            continue
        beside = tensors.get(weight)
        if beside is None:
            what = "is a scale without a weight"
        else:
            what = f"is a scale beside {_told(beside)}, which is not quantised"
        reasons.append(_wrong(weight, f"{_told(info)} {what}", name))
    return reasons


def _dense(name: str, shape: tuple[int, int], tensors: Mapping[str, TensorInfo]) -> list[Reason]:
    info = tensors.get(name)
    if info is None:
        return [_wrong(name, f"{name} {list(shape)} is missing")]
    if info.shape != shape:
        return [_wrong(name, f"{_told(info)} where the model needs {list(shape)}")]
    return []


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _told(info: TensorInfo) -> str:
    return f"{info.name} {info.scheme} {list(info.shape)}"


def _wrong(weight: str, message: str, scale: str = "") -> Reason:
    return Reason("stored-weight", message, {"tensor": weight, "scale": scale or weight})


def _refused(reasons: list[Reason]) -> RefusedError:
    return RefusedError(
        f"The checkpoint does not fit its configuration in {len(reasons)} places.",
        "Use a config.json and weights of one release; convert the file again if it is your own.",
        reasons=reasons,
        code="bad_checkpoint",
    )
