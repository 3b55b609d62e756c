"""Put an executor together from a resolved plan: weights, caches, op table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    WHOLE,
    Progress,
    RankPart,
    TensorSource,
    load_parts,
    load_weights,
    part_of,
)
from metainfer.executor.local import LocalExecutor, LocalParts
from metainfer.executor.prompts import MakeDrafts, prompt_ranks
from metainfer.kernels.impl import resolve_attribute
from metainfer.kernels.registry import Registry
from metainfer.kernels.table import OpTable, Trace
from metainfer.kv.store.pools import KVStore
from metainfer.models.arch import Arch, WeightSpec
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
        shard=_shard(arch, place),
    )
    parts = load_parts(arch, source, layouts, weights, place, dtype=dtype, device=device)
    phase("model")
    family = family_of({"model_type": arch.family}, "plan")
    own = arch.on_rank(layout) if layout.ranks > 1 else arch
    positions = plan.limits.max_context
    model: Any = resolve_attribute(family.build)(
        own, weights.packed, weights.plain, max_positions=positions, device=device, ranks=ranks
    )
    adapted = _use_adapters(model, arch, dtype, device)
    _tell(model, plan, device)
    phase("cache")
    store = KVStore(resolved.sizes, device)
    ops = OpTable(resolved.selection, trace)
    groups = own_parts(resolved.groups, ranks)
    prompts = prompt_ranks(model, parts, store, groups, place, ranks, device, plan)
    drafter = None
    if plan.draft.method == MODEL:
        make = _drafter_of(family.drafter, store.layers[arch.layers], ops)
        drafter = make(model, weights.packed, weights.plain)
        prompts = prompts and prompts.drafted_by(make, parts, drafter)
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
            adapters=arch.adapters.count if arch.adapters else 0,
            prompts=prompts,
            dealt=dealt_chunks(model, groups, layout, ranks, device),
            overlap=plan.overlap,
            halves=plan.halves,
            sum_pieces=plan.sum_pieces,
            prefill_from=plan.prefill_from,
            turns=ranks.turns,
        )
    )


def _shard(arch: Arch, place: Place | None) -> Callable[[WeightSpec], RankPart]:
    """What of each weight the rank at `place` holds."""
    if place is None:
        return lambda spec: WHOLE
    return lambda spec: part_of(arch.cut(spec, place.layout.decoding), place)


def _use_adapters(model: Any, arch: Arch, dtype: torch.dtype, device: torch.device) -> int:
    """Load the adapters of a model that has any; their bytes."""
    if arch.adapters is None:
        return 0
    adapters = load_adapters(arch.adapters, dtype=dtype, device=device)
    model.use_adapters(adapters)
    return sum(pairs.nbytes for pairs in adapters.values())


def _drafter_of(name: str, cache: Mapping[str, Any], ops: OpTable) -> MakeDrafts:
    """What makes a family's drafter. Its caches follow those of the model's layers."""
    drafter: Any = resolve_attribute(name)
    return partial(drafter, cache=cache, table=ops)


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
