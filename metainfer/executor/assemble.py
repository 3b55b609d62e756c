"""Put an executor together from a resolved plan: weights, caches, op table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from metainfer.comm.card_side import CardSide
from metainfer.comm.peers import SINGLE, Place, Ranks
from metainfer.comm.side import IN_ORDER
from metainfer.core.plan import Plan
from metainfer.executor.adapters import load_adapters
from metainfer.executor.dealt import dealt_chunks, own_parts
from metainfer.executor.loading import (
    LoadedWeights,
    Progress,
    TensorSource,
    load_parts,
    load_weights,
    shard_at,
    shards_held,
)
from metainfer.executor.local import LocalExecutor, LocalParts
from metainfer.executor.model_drafts import ModelDrafts
from metainfer.executor.prompts import PromptRanks, prompt_ranks
from metainfer.kernels.impl import resolve_attribute
from metainfer.kernels.registry import Registry
from metainfer.kernels.table import OpTable, Trace
from metainfer.kv.store.pools import KVStore
from metainfer.models.arch import Arch
from metainfer.models.common.spread import Part
from metainfer.models.registry import family_of
from metainfer.planner.drafts import MODEL
from metainfer.planner.resolve import Resolved

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def assemble(
    resolved: Resolved,
    source: TensorSource,
    registry: Registry,
    device: torch.device,
    *,
    progress: Progress | None = None,
    phase: Callable[[str], None] = lambda name: None,
    trace: Trace | None = None,
    place: Place | None = None,
    ranks: Ranks = SINGLE,
) -> LocalExecutor:
    """Load weights and build everything that a step needs; the caller warms it up.

    `place`, `ranks`: of several, which rank this is, and its company; it loads its part alone.

    Raises:
        ModelError: the checkpoint does not fit its config.
    """
    plan, arch = resolved.plan, resolved.arch
    layout, dtype = plan.layouts[0], DTYPES[plan.model.dtype]
    _use_threads(plan, device)
    phase("weights")
    layouts = {role: registry.layout(layout) for role, layout in plan.bundle.items()}
    weights = load_weights(
        arch,
        source,
        layouts,
        dtype=dtype,
        device=device,
        progress=progress,
        shard=shard_at(arch, place),
    )
    parts = load_parts(arch, source, layouts, weights, place, dtype=dtype, device=device)
    phase("model")
    family = family_of({"model_type": arch.family}, "plan")
    own = arch.on_rank(layout) if layout.ranks > 1 else arch
    positions = plan.limits.max_context
    model: Any = resolve_attribute(family.build)(
        own, weights.packed, weights.plain, max_positions=positions, device=device, ranks=ranks
    )
    _tell(model, plan, device)
    phase("cache")
    store = KVStore(resolved.sizes, device)
    ops = OpTable(resolved.selection, trace)
    groups = own_parts(resolved.groups, ranks)
    prompts = prompt_ranks(model, parts, store, groups, place, ranks, device, plan)
    adapted = _use_adapters(model, prompts, arch, own, place, device, dtype)
    drafter = None
    if plan.draft.method == MODEL:
        # Its caches follow those of the model's layers.
        own_cache = store.layers[arch.layers]
        drafter, prompts = _drafting(family.drafter, model, prompts, weights, parts, own_cache, ops)
    return LocalExecutor(
        LocalParts(
            model=model,
            ops=ops,
            store=store,
            groups=groups,
            device=device,
            slots=resolved.sizes.slots,
            step_tokens=plan.limits.step_tokens,
            max_context=plan.limits.max_context,
            vocab=arch.vocab_size,
            weight_bytes=weights.nbytes + model.table_bytes + adapted,
            graphs=plan.graphs,
            drafts=plan.draft.depth,
            model_drafts=drafter,
            adapters=len(plan.adapters),
            prompts=prompts,
            dealt=dealt_chunks(model, groups, layout, ranks, device),
            overlap=plan.overlap,
            halves=plan.halves,
            sum_pieces=plan.sum_pieces,
            prefill_from=plan.prefill_from,
            turns=ranks.turns,
        )
    )


def _use_adapters(
    model: Any,
    prompts: PromptRanks | None,
    arch: Arch,
    own: Arch,
    place: Place | None,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """Load the adapters of a model that has any, beside the parts of it that are here; their bytes.
    `own`: one rank's."""
    if arch.adapters is None or own.adapters is None:
        return 0
    parts, held = load_adapters(
        arch.adapters,
        own.adapters,
        arch.packed_weights(),
        shards_held(arch, place),
        dtype=dtype,
        device=device,
    )
    if prompts is not None:
        prompts.model.use_adapters(parts)
    mine = place.rank % len(parts) if place is not None else 0
    model.use_adapters([parts[mine]])
    return held


def _drafting(
    name: str,
    model: Any,
    prompts: PromptRanks | None,
    weights: LoadedWeights,
    parts: Sequence[Part],
    cache: Mapping[str, Any],
    ops: OpTable,
) -> tuple[ModelDrafts, PromptRanks | None]:
    """A family's drafter by `name` beside `model`, and beside what computes chunks; one cache."""
    drafter: Any = resolve_attribute(name)
    make = partial(drafter, cache=cache, table=ops)
    found = make(model, weights.packed, weights.plain)
    return found, prompts and prompts.drafted_by(make, parts, found)


def _use_threads(plan: Plan, device: torch.device) -> None:
    """The plan's threads, shared by the ranks of a host."""
    if device.type == "cpu":
        here = 1 if plan.emulated else plan.layouts[0].ranks
        torch.set_num_threads(max(1, plan.threads // here))


def _tell(model: Any, plan: Plan, device: torch.device) -> None:
    """Tell the model what the plan computes beside something else, with a stream for it, and from
    how many rows on it rounds what it sends."""
    if plan.shared_beside:
        model.beside = CardSide(device) if device.type == "cuda" else IN_ORDER
        model.beside_rows = plan.shared_beside
    if plan.rounded_from:
        model.rounded_from = plan.rounded_from
