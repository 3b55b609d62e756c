"""Put an executor together from a resolved plan: weights, caches, op table."""

from __future__ import annotations

from collections.abc import Callable

import torch

from metainfer.core.step import Phase
from metainfer.executor.loading import Progress, TensorSource, load_weights
from metainfer.executor.local import LocalExecutor, LocalParts
from metainfer.kernels.impl import resolve_attribute
from metainfer.kernels.registry import Registry
from metainfer.kernels.table import OpTable, Trace
from metainfer.kv.store.pools import KVStore
from metainfer.models.dense.arch import DenseArch
from metainfer.models.registry import family_of
from metainfer.planner.resolve import Resolved

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

GRAPH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Token counts at which decode is captured, up to the most running sequences."""


def assemble(
    resolved: Resolved,
    source: TensorSource,
    registry: Registry,
    device: torch.device,
    *,
    progress: Progress | None = None,
    phase: Callable[[str], None] = lambda name: None,
    trace: Trace | None = None,
) -> LocalExecutor:
    """Load weights and build everything that a step needs; the caller warms it up.

    Raises:
        ModelError: the checkpoint does not fit its config.
    """
    plan, arch = resolved.plan, resolved.arch
    assert isinstance(arch, DenseArch)
    dtype = DTYPES[plan.model.dtype]
    if device.type == "cpu":
        torch.set_num_threads(plan.threads)
    phase("weights")
    layout = registry.layout(plan.bundle["weight"])
    weights = load_weights(arch, source, layout, dtype=dtype, device=device, progress=progress)
    phase("model")
    build = resolve_attribute(family_of({"model_type": arch.family}, "plan").build)
    model = build(
        arch,
        weights.packed,
        weights.plain,
        max_positions=plan.limits.max_context,
        device=device,
    )
    phase("cache")
    store = KVStore(
        resolved.groups,
        resolved.sizes.pages,
        kv_heads=arch.kv_heads,
        head_dim=arch.head_dim,
        dtype=dtype,
        device=device,
    )
    ops = OpTable(resolved.selection, trace)
    graphs = device.type == "cuda" and _graph_safe(resolved)
    return LocalExecutor(
        LocalParts(
            model=model,
            ops=ops,
            store=store,
            groups=resolved.groups,
            device=device,
            slots=plan.limits.max_running,
            step_tokens=plan.limits.step_tokens,
            max_context=plan.limits.max_context,
            vocab=arch.vocab_size,
            weight_bytes=weights.nbytes,
            graph_buckets=_buckets(plan.limits.max_running) if graphs else (),
        )
    )


def _graph_safe(resolved: Resolved) -> bool:
    """Whether every op of the decode step may be captured; sampling runs outside the graph."""
    return all(
        choice.impl.graph_safe
        for choice in resolved.selection.bundle.choices
        if choice.request.phase is Phase.DECODE and choice.request.op != "sample"
    )


def _buckets(running: int) -> tuple[int, ...]:
    """Buckets up to `running`, largest first so that captures share the largest one's memory."""
    reached = [bucket for bucket in GRAPH_BUCKETS if bucket < running]
    return tuple(sorted({*reached, running}, reverse=True))
