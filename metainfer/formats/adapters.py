"""LoRA adapters in PEFT's layout, from headers alone: a pair of matrices per module. No torch.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors`` with
``base_model.model.<module>.lora_A.weight`` [r, K] and ``...lora_B.weight`` [N, r] for every module
that the configuration targets. Everything that does not fit the base model is told at once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from metainfer.core.digest import canonical_json
from metainfer.core.errors import ModelError
from metainfer.core.verdict import Reason
from metainfer.formats.adapter_config import CONFIG_NAME, AdapterConfig, read_adapter_config
from metainfer.formats.completeness import FLOATS, CheckpointError, fold
from metainfer.formats.index import TensorInfo
from metainfer.formats.safetensors_header import load_json_object, read_file

WEIGHTS_NAME = "adapter_model.safetensors"
PICKLED_NAME = "adapter_model.bin"
DIGEST_BYTES = 16

_PAIR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class LowRank:
    """One module's pair: ``W + scale * B A`` with A [rank, K] and B [N, rank]."""

    rank: int
    scale: float
    a: TensorInfo
    b: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter that fits its base model. `modules`: by the name of the module in the base.

    `base`: what its configuration says it was made for. `digest`: of tensors and scales; equal
    ones compute the same.
    """

    name: str
    folder: Path
    base: str
    digest: str
    modules: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest of its ranks."""
        return max(pair.rank for pair in self.modules.values())


def read_adapter(
    name: str,
    folder: Path,
    targets: Mapping[str, tuple[int, int]],
    kept: Mapping[str, str],
) -> Adapter:
    """The adapter in `folder`.

    Args:
        targets: module of the base model -> (N, K), where a pair can stand.
        kept: module -> why none can (the embedding, the head).

    Raises:
        ModelError: the folder or one of its files cannot be read.
        CheckpointError: it does not fit; has every fault.
    """
    config, reasons = read_adapter_config(_config_of(name, folder))
    tensors = _tensors_of(name, folder)
    modules: dict[str, LowRank] = {}
    if config is not None:
        modules, faults = _pairs(config, tensors, targets, kept)
        reasons += faults
    if reasons or config is None:
        made = f" (made for {config.base!r})" if config is not None and config.base else ""
        raise CheckpointError(
            f"adapter {name!r} in {folder}{made} cannot be used with this model.",
            "Use an adapter that was trained on this model with plain LoRA.",
            reasons=fold(reasons),
            code="bad_adapter",
        )
    digest = _digest(folder / WEIGHTS_NAME, modules)
    return Adapter(name=name, folder=folder, base=config.base, digest=digest, modules=modules)


def _config_of(name: str, folder: Path) -> Mapping[str, object]:
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ModelError(
            f"adapter {name!r}: {str(folder)!r} holds no {CONFIG_NAME}.",
            "Pass the folder that PEFT's save_pretrained wrote.",
            code="not_an_adapter",
        )
    return load_json_object(path)


def _tensors_of(name: str, folder: Path) -> Mapping[str, TensorInfo]:
    path = folder / WEIGHTS_NAME
    if path.is_file():
        return read_file(path)[0]
    pickled = (folder / PICKLED_NAME).is_file()
    raise ModelError(
        f"adapter {name!r}: {folder} holds {f'only {PICKLED_NAME}' if pickled else 'no weights'}.",
        f"Pickled files are not read; save it as {WEIGHTS_NAME}."
        if pickled
        else f"An adapter's weights are in {WEIGHTS_NAME}.",
        code="pickled_adapter" if pickled else "not_an_adapter",
    )


def _pairs(
    config: AdapterConfig,
    tensors: Mapping[str, TensorInfo],
    targets: Mapping[str, tuple[int, int]],
    kept: Mapping[str, str],
) -> tuple[dict[str, LowRank], list[Reason]]:
    """The pairs by module, and every fault."""
    reasons = [
        _fault("target", f"it targets {module}: {why}")
        for module, why in kept.items()
        if config.targets_module(module)
    ]
    wanted = [module for module in targets if config.targets_module(module)]
    if not wanted and not reasons:
        listed = config.targets if isinstance(config.targets, str) else ", ".join(config.targets)
        reasons.append(_fault("target", f"no module of this model is one of its targets: {listed}"))
    sides: dict[str, dict[str, TensorInfo]] = {module: {} for module in wanted}
    for stored, info in tensors.items():
        found = _PAIR.fullmatch(stored)
        if found is None:
            reasons.append(_fault("tensor-name", f"{stored} is no part of plain LoRA"))
        elif found["module"] in sides:
            sides[found["module"]][found["side"]] = info
        elif found["module"] not in kept:
            where = "its own targets" if found["module"] in targets else "this model's matrices"
            reasons.append(_fault("tensor-name", f"{stored} is none of {where}"))
    pairs: dict[str, LowRank] = {}
    for module, pair in sides.items():
        rank = config.rank_of(module)
        n, k = targets[module]
        faults = [
            *_side(module, "A", pair.get("A"), (rank, k)),
            *_side(module, "B", pair.get("B"), (n, rank)),
        ]
        reasons += faults
        if not faults:
            pairs[module] = LowRank(rank, config.scale_of(module), pair["A"], pair["B"])
    return pairs, reasons


def _side(module: str, side: str, info: TensorInfo | None, shape: tuple[int, int]) -> list[Reason]:
    if info is None:
        return [_fault("missing-tensor", f"{module}.lora_{side} {list(shape)} is missing")]
    told = f"{module}.lora_{side} {info.scheme} {list(info.shape)}"
    if info.shape != shape:
        return [_fault("tensor-shape", f"{told} where model and rank say {list(shape)}")]
    if info.scheme not in FLOATS:
        return [_fault("tensor-dtype", f"{told} needs to be {' or '.join(FLOATS)}")]
    return []


def _fault(code: str, message: str) -> Reason:
    return Reason(code, message)


def _digest(path: Path, modules: Mapping[str, LowRank]) -> str:
    scales = {module: pair.scale for module, pair in sorted(modules.items())}
    found = hashlib.blake2b(canonical_json(scales).encode(), digest_size=DIGEST_BYTES)
    try:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                found.update(block)
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.", "Check the file.") from error
    return found.hexdigest()
