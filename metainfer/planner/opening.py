"""From a model reference to what the resolver may know of it: headers, no weights, no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from metainfer.core.errors import UsageError
from metainfer.formats.checks import StoredWeight, examine, read_config
from metainfer.formats.completeness import Names, Wanted, logical_shapes, objections, refusal
from metainfer.formats.drawn import Drawn
from metainfer.formats.index import CheckpointIndex
from metainfer.formats.source import ModelSource, resolve
from metainfer.models.arch import Arch
from metainfer.models.common.config import token_ids
from metainfer.models.registry import (
    checkpoint_names,
    family_of,
    random_config,
    random_draws,
    read_arch,
)
from metainfer.planner.drafts import DraftModule
from metainfer.planner.resolve import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model's files, understood. `index` and `blocks` belong to a checkpoint, `seed` and `draws`
    to random weights; all by the names that the arch knows tensors by.

    `blocks`: matrices that are stored block-scaled. `eos_token_ids`: ids that end an answer, the
    generation config's over the model config's.
    """

    source: ModelSource
    arch: Arch
    facts: ModelFacts
    index: CheckpointIndex | None
    seed: int
    eos_token_ids: tuple[int, ...]
    blocks: Mapping[str, StoredWeight] = field(default_factory=dict)
    draws: Mapping[str, Drawn] = field(default_factory=dict)


def open_model(
    reference: str, *, adapters: Mapping[str, str] | None = None, fetch: bool = True
) -> OpenedModel:
    """Resolve a reference, read its config and headers, check that the tensors are all there.

    `adapters`: name -> folder of those that stand beside its weights.

    Raises:
        ModelError, UsageError: with cause and remedy.
        CheckpointError: the tensors of the model or of an adapter do not fit; has every fault.
        RefusedError: the model's family takes no adapters.
    """
    model = _open(reference, fetch)
    if not adapters:
        return model
    if reference in adapters:
        raise UsageError(
            f"an adapter has the model's own name {reference!r}.", "Give it another name."
        )
    folders = {name: Path(os.path.expanduser(folder)) for name, folder in adapters.items()}
    arch = model.arch.with_adapters(folders)
    return replace(model, arch=arch, facts=replace(model.facts, arch=arch))


def _open(reference: str, fetch: bool) -> OpenedModel:
    source = resolve(reference, fetch=fetch)
    if (drawn := source.random) is not None:
        config = random_config(drawn.family, drawn.params)
        source = replace(source, config=config)
        arch = read_arch(config, reference)
        draws = random_draws(arch, config)
        return OpenedModel(
            source=source,
            arch=arch,
            facts=_facts(source, arch, lambda name: draws[name].scheme),
            index=None,
            seed=int(drawn.params.get("seed", "0")),
            eos_token_ids=arch.eos_token_ids,
            draws=draws,
        )
    assert source.path is not None
    arch = read_arch(source.config, str(source.path))
    index, blocks, drafts = _checked(arch, source, CheckpointIndex.open(source.path))

    def scheme_of(name: str) -> str:
        return blocks[name].format.name if name in blocks else index[name].scheme

    return OpenedModel(
        source=source,
        arch=arch,
        facts=replace(_facts(source, arch, scheme_of), draft=DraftModule() if drafts else None),
        index=index,
        seed=0,
        eos_token_ids=token_ids(source.generation_config, "eos_token_id") or arch.eos_token_ids,
        blocks=blocks,
    )


def _facts(source: ModelSource, arch: Arch, scheme_of: Callable[[str], str]) -> ModelFacts:
    counted: dict[tuple[str, ...], int] = {}
    for spec in (*arch.packed_weights(), *arch.plain_weights()):
        biases = spec.shape[0] if spec.bias else 0
        counted[spec.tensors] = 0 if spec.dtype == "int64" else spec.elements + biases
    return ModelFacts(
        reference=source.reference,
        arch=arch,
        scheme_of=scheme_of,
        parameters=sum(counted.values()),
        missing=family_of(source.config, source.reference).missing,
    )


def _checked(
    arch: Arch, source: ModelSource, index: CheckpointIndex
) -> tuple[CheckpointIndex, dict[str, StoredWeight], bool]:
    """The index by the arch's names, its block-scaled matrices, whether it has a draft to run.

    Every tensor that the arch names exists with its shape; nothing is left over unexplained.
    """
    wanted: dict[str, Wanted] = {}
    for spec in (*arch.packed_weights(), *arch.plain_weights()):
        shapes = spec.tensor_shapes()
        integer = spec.dtype == "int64"
        wanted |= {n: Wanted(s, integer) for n, s in zip(spec.tensors, shapes, strict=True)}
        wanted |= {n: Wanted(s[:1]) for n, s in zip(spec.bias, shapes, strict=False)}
    quant = read_config(source.config)
    names: Names = checkpoint_names(arch, source.config, index.tensors, quant.block)
    blocks, told = examine(quant, names.tensors, logical_shapes(names, wanted))
    reasons = [*names.reasons, *told, *objections(names, wanted, blocks, told, _derived)]
    if reasons:
        raise refusal(str(source.path), reasons)
    return replace(index, tensors=names.tensors), blocks, names.drafts


def _derived(name: str) -> bool:
    """Tensors that old exporters wrote and that follow from the config, or a tied head's copy."""
    return name.endswith("rotary_emb.inv_freq") or name in ("lm_head.weight", "rope_freqs.weight")
