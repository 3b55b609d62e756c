"""A DeepSeek-V4 checkpoint with its experts in another low-precision format.

Only routed experts change; every other tensor is copied byte for byte, names stay DeepSeek's own
(NVFP4: ModelOpt's). With `lossless` all tensors are examined before anything is written, and one
error names each that cannot be held exactly. Without it a tensor is exact where that is possible
and rounded otherwise, and the report says which.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metainfer.core.errors import ModelError, RefusedError
from metainfer.core.verdict import Reason
from metainfer.formats.block_codecs import BlockTensor, decode, from_stored
from metainfer.formats.blocks import MXFP4, NVFP4, BlockFormat, fp8_block
from metainfer.formats.checkpoint import Checkpoint
from metainfer.formats.checks import StoredWeight, find_weights, read_config
from metainfer.formats.lossless import mxfp4_to_nvfp4, recode, same_bits, shared_exponent
from metainfer.formats.safetensors_header import INDEX_NAME, load_json_object
from metainfer.formats.safetensors_writer import SHARD_BYTES, Entry, Writer

TARGETS = ("fp8", "mxfp4", "nvfp4")
_EXPERT = re.compile(r"\.experts\.\d+\.[^.]+\.weight$")
_NVFP4_KEYS: Mapping[str, Any] = {
    "quant_algo": "MIXED_PRECISION",
    "moe_quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
}
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Report:
    """What was done. `unfused`: pairs w1, w3 that could not share one second scale."""

    to: str
    converted: int = 0
    kept: int = 0
    rounded: list[str] = field(default_factory=list)
    unfused: list[str] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0

    def to_json(self) -> dict[str, object]:
        return {
            "to": self.to, "converted": self.converted, "kept": self.kept,
            "exact": self.converted - len(self.rounded), "rounded": self.rounded,
            "unfused": self.unfused, "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Job:
    checkpoint: Checkpoint
    chosen: Mapping[str, StoredWeight]
    targets: Mapping[str, BlockFormat]

    def load(self, name: str) -> BlockTensor:
        stored = self.chosen[name]
        read = self.checkpoint.read
        second = read(stored.second).data if stored.second else None
        return from_stored(stored.format, read(stored.data).data, read(stored.scale).data, second)

    def entries(self, name: str) -> list[Entry]:
        fmt, (n, k) = self.targets[name], self.chosen[name].shape
        made = [
            Entry(fmt.leaf(name, fmt.data_leaf), fmt.data_dtype, fmt.data_shape(n, k)),
            Entry(fmt.leaf(name, fmt.scale_leaf), fmt.scale, fmt.scale_shape(n, k)),
        ]
        if fmt.second_leaf:
            made.append(Entry(fmt.leaf(name, fmt.second_leaf), "F32", ()))
        return made


def convert(
    source: Path,
    target: Path,
    to: str,
    *,
    lossless: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Report:
    """Write `source` to the new folder `target` with routed experts in `to` (`TARGETS`).

    ``nvfp4`` leaves ``mtp.*`` as it is, as the published files do, and writes no ``input_scale``:
    there is no calibration here. Raises `ModelError` when there is nothing to convert and
    `RefusedError` (``not_lossless``) with a reason per tensor.
    """
    config = load_json_object(source / "config.json")
    checkpoint = Checkpoint.open(source)
    tensors = checkpoint.index.tensors
    settings = read_config(config)
    job = _choose(checkpoint, find_weights(settings, tensors), to, settings.block)
    report = Report(to, len(job.chosen), bytes_before=checkpoint.index.nbytes)
    exponents = _exponents(job, report) if to == "nvfp4" else {}
    if lossless:
        _examine(job, exponents)
    dropped = {name for weight in job.chosen for name in _parts(weight, job.chosen[weight])}
    order = sorted(tensors.values(), key=lambda info: (info.file, info.offset))
    by_data = {stored.data: weight for weight, stored in job.chosen.items()}
    entries: list[Entry] = []
    for info in order:
        if info.name in by_data:
            entries += job.entries(by_data[info.name])
        elif info.name not in dropped:
            entries.append(Entry(info.name, info.scheme, info.shape))
            report.kept += 1
    report.bytes_after = sum(entry.nbytes for entry in entries)
    with Writer(target, entries, shard_bytes=shard_bytes) as writer:
        for count, info in enumerate(order, 1):
            if info.name in by_data:
                _put(writer, job, by_data[info.name], exponents, report)
            elif info.name not in dropped:
                writer.put(info.name, _bytes(checkpoint.read(info.name).data))
            if progress is not None:
                progress(count, len(order))
    _copy_others(source, target, _new_config(config, to))
    find_weights(read_config(load_json_object(target / "config.json")),
                 Checkpoint.open(target).index.tensors)  # fmt: skip
    return report


def _choose(
    checkpoint: Checkpoint,
    found: Mapping[str, StoredWeight],
    to: str,
    block: tuple[int, int] | None,
) -> _Job:
    if to not in TARGETS:
        raise ValueError(f"target {to!r} is not one of {TARGETS}")
    base = {"nvfp4": NVFP4, "mxfp4": MXFP4}.get(to) or fp8_block(block or (128, 128), "F8_E8M0")
    chosen, targets = {}, {}
    for name, stored in found.items():
        if not _EXPERT.search(name) or (to == "nvfp4" and name.startswith("mtp.")):
            continue
        if stored.format.identifier == base.identifier:
            continue
        chosen[name] = stored
        leaf = stored.scale.rpartition(".")[2]
        keep = base is not NVFP4 and leaf in ("scale", "weight_scale_inv")
        targets[name] = replace(base, scale_leaf=leaf) if keep else base
    if not chosen:
        raise ModelError(
            f"The checkpoint has no routed experts to convert to {to}.",
            "It may be in that format already; only quantised experts are converted.",
            code="nothing_to_convert",
        )
    return _Job(checkpoint, chosen, targets)


def _parts(weight: str, stored: StoredWeight) -> Iterable[str]:
    """The tensors that a converted weight replaces."""
    stem = weight.rpartition("weight")[0]
    return (stored.data, stored.scale, stored.second, stem + "input_scale",
            stem + "input_global_scale")  # fmt: skip


def _exponents(job: _Job, report: Report) -> dict[str, int]:
    """Exponents of ``weight_scale_2``, shared by w1 and w3 of an expert where both fit."""
    found: dict[str, int] = {}
    for name in job.chosen:
        if job.chosen[name].format.identifier != MXFP4.identifier or name in found:
            continue
        partner = name.replace(".w1.", ".w3.") if ".w1." in name else name.replace(".w3.", ".w1.")
        names = [name, partner] if partner != name and partner in job.chosen else [name]
        try:
            shared = shared_exponent([job.load(each) for each in names], names)
            found |= dict.fromkeys(names, shared)
        except ModelError as error:
            if error.code != "not_lossless":
                raise
            if len(names) == 2 and partner not in found and name not in report.unfused:
                report.unfused += sorted(names)
    report.unfused = sorted(set(report.unfused))
    return found


def _examine(job: _Job, exponents: Mapping[str, int]) -> None:
    reasons = []
    for name, fmt in job.targets.items():
        if name in exponents:
            continue  # its span is known to fit, and the writer proves it
        try:
            recode(job.load(name), fmt, name, lossless=True)
        except ModelError as error:
            reasons.append(Reason(error.code, error.cause.rstrip("."), {"tensor": name}))
    if reasons:
        raise RefusedError(
            f"{len(reasons)} of {len(job.targets)} tensors cannot be converted without loss.",
            "Keep the checkpoint as it is, or convert without --lossless.",
            reasons=reasons,
            code="not_lossless",
        )


def _put(
    writer: Writer, job: _Job, name: str, exponents: Mapping[str, int], report: Report
) -> None:
    source = job.load(name)
    if name in exponents:
        result = mxfp4_to_nvfp4(source, name, exponents[name])
    else:
        result = recode(source, job.targets[name], name, lossless=False)
        if not same_bits(decode(source, torch.float64), decode(result, torch.float64)):
            report.rounded.append(name)
    parts = [result.data, result.scale, *([] if result.second is None else [result.second])]
    for entry, part in zip(job.entries(name), parts, strict=True):
        writer.put(entry.name, _bytes(part))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _new_config(config: dict[str, Any], to: str) -> dict[str, Any]:
    """`config` with its quantisation section describing the new experts."""
    config = json.loads(json.dumps(config))
    holder = config if "quantization_config" in config else config.get("text_config", config)
    section = holder.setdefault("quantization_config", {})
    for key in _NVFP4_KEYS:
        section.pop(key, None)
    if to == "nvfp4":
        section |= _NVFP4_KEYS
    place = section if "expert_dtype" in section else config
    place["expert_dtype"] = "fp8" if to == "fp8" else "fp4"
    if to == "fp8":
        section.setdefault("weight_block_size", [128, 128])
    return dict(config)


def _copy_others(source: Path, target: Path, config: dict[str, Any]) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX_NAME:
            shutil.copyfile(path, target / path.name)
    (target / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
