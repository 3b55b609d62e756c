"""The executor under an engine: this process, or one process per rank of the plan's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from metainfer.core.intent import Intent
from metainfer.engine.machine import Machine
from metainfer.planner.opening import OpenedModel
from metainfer.planner.resolve import Resolved

if TYPE_CHECKING:
    from metainfer.executor.local import LocalExecutor
    from metainfer.executor.ranks import RankExecutor
    from metainfer.kernels.table import Trace

RANK = "metainfer.engine.rank:Rank"
START_S = 600.0
"""How long ranks may take to load; a rank that dies is noticed at once."""


def open_executor(
    resolved: Resolved,
    model: OpenedModel,
    machine: Machine,
    intent: Intent,
    *,
    note: Callable[[str], None],
    trace: Trace | None = None,
) -> LocalExecutor | RankExecutor:
    """Weights loaded and everything built that a step needs; the caller warms it up.

    Raises:
        ModelError: the checkpoint does not fit its config.
        GroupError: a rank could not start; the others are ended.
    """
    layout = resolved.plan.layouts[0]
    if layout.ranks > 1:
        return _open_ranks(resolved, intent, note)
    from metainfer.executor.assemble import assemble
    from metainfer.executor.loading import tensor_source

    device = machine.torch_device()
    source = tensor_source(model, device)
    return assemble(resolved, source, machine.registry, device, trace=trace)


def _open_ranks(resolved: Resolved, intent: Intent, note: Callable[[str], None]) -> RankExecutor:
    from metainfer.comm.segment import sweep
    from metainfer.engine.rank import facts_of
    from metainfer.executor.ranks import RankExecutor
    from metainfer.workers.ranks import ProcessGroup

    layout = resolved.plan.layouts[0]
    note(f"{layout.ranks} ranks")
    facts = [facts_of(intent, resolved)] * layout.ranks
    group = ProcessGroup.spawn(
        RANK, layout.ranks, facts=facts, start_s=START_S, after_close=[sweep]
    )
    return RankExecutor(group, layout, resolved.sizes.slots)
