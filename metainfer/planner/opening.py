"""From a model reference to what the resolver may know of it: headers, no weights, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from metainfer.core.errors import ModelError
from metainfer.formats.index import CheckpointIndex
from metainfer.formats.source import ModelSource, resolve
from metainfer.models.arch import Arch
from metainfer.models.common.config import token_ids
from metainfer.models.registry import random_config, read_arch
from metainfer.planner.resolve import ModelFacts

RANDOM_SCHEME = "BF16"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model's files, understood. `seed` is set for random weights, `index` otherwise.

    `eos_token_ids`: ids that end an answer, the generation config's over the model config's.
    """

    source: ModelSource
    arch: Arch
    facts: ModelFacts
    index: CheckpointIndex | None
    seed: int
    eos_token_ids: tuple[int, ...]


def open_model(reference: str, *, fetch: bool = True) -> OpenedModel:
    """Resolve a reference, read its config and headers, check that the tensors are all there.

    Raises:
        ModelError, UsageError: with cause and remedy.
    """
    source = resolve(reference, fetch=fetch)
    if (drawn := source.random) is not None:
        config = random_config(drawn.family, drawn.params)
        source = replace(source, config=config)
        arch = read_arch(config, reference)
        seed = int(drawn.params.get("seed", "0"))
        return _opened(source, arch, None, lambda name: RANDOM_SCHEME, seed)
    assert source.path is not None
    arch = read_arch(source.config, str(source.path))
    index = CheckpointIndex.open(source.path)
    _check_complete(arch, index, str(source.path))
    return _opened(source, arch, index, lambda name: index[name].scheme, 0)


def _opened(
    source: ModelSource,
    arch: Arch,
    index: CheckpointIndex | None,
    scheme_of: Callable[[str], str],
    seed: int,
) -> OpenedModel:
    counted: dict[tuple[str, ...], int] = {}
    for spec in (*arch.packed_weights(), *arch.plain_weights()):
        biases = spec.shape[0] if spec.bias else 0
        counted[spec.tensors] = spec.elements + biases
    facts = ModelFacts(
        reference=source.reference,
        arch=arch,
        scheme_of=scheme_of,
        parameters=sum(counted.values()),
    )
    eos = token_ids(source.generation_config, "eos_token_id") or arch.eos_token_ids
    return OpenedModel(
        source=source, arch=arch, facts=facts, index=index, seed=seed, eos_token_ids=eos
    )


def _check_complete(arch: Arch, index: CheckpointIndex, where: str) -> None:
    """Every tensor that the arch names exists with its shape; nothing is left over unexplained."""
    wanted: dict[str, tuple[int, ...]] = {}
    for spec in (*arch.packed_weights(), *arch.plain_weights()):
        shapes = spec.tensor_shapes()
        wanted.update(zip(spec.tensors, shapes, strict=True))
        wanted.update((name, shape[:1]) for name, shape in zip(spec.bias, shapes, strict=False))
    missing = [name for name in wanted if name not in index.tensors]
    if missing:
        raise ModelError(
            f"{where} lacks {len(missing)} tensors, the first is {missing[0]}.",
            "The download is incomplete, or config.json belongs to another model.",
            code="missing_tensor",
        )
    for name, shape in wanted.items():
        if index[name].shape != shape:
            raise ModelError(
                f"tensor {name} has shape {list(index[name].shape)}, "
                f"the config says {list(shape)}.",
                "The weights do not belong to this config; fetch the checkpoint again.",
                code="bad_shape",
            )
    extra = [name for name in index.tensors if name not in wanted and not _derived(name)]
    if extra:
        raise ModelError(
            f"{where} holds {len(extra)} tensors that the model does not use, "
            f"the first is {extra[0]}.",
            "They would be ignored, and the answers might differ; check config.json.",
            code="unused_tensor",
        )


def _derived(name: str) -> bool:
    """Tensors that old exporters wrote and that follow from the config, or a tied head's copy."""
    return name.endswith("rotary_emb.inv_freq") or name in ("lm_head.weight", "rope_freqs.weight")
