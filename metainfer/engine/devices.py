"""The executor under an engine: this process, or one process per rank of the plan's layout.

In this process it is the whole model, or one rank of several whose peers are emulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from metainfer.core.intent import Intent
from metainfer.engine.machine import Machine
from metainfer.planner.emulation import Emulation, emulation_of
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
    emulation = emulation_of(intent)
    if emulation is not None:
        return _open_emulated(resolved, model, machine, emulation, trace)
    if resolved.plan.layouts[0].ranks > 1:
        return _open_ranks(resolved, machine, intent, note)
    from metainfer.executor.assemble import assemble
    from metainfer.executor.loading import tensor_source

    device = machine.torch_device()
    source = tensor_source(model, device)
    return assemble(resolved, source, machine.registry, device, trace=trace)


def _open_emulated(
    resolved: Resolved,
    model: OpenedModel,
    machine: Machine,
    emulation: Emulation,
    trace: Trace | None,
) -> LocalExecutor:
    """The first rank, in this process; its peers are a stand-in."""
    from metainfer.comm.emulated_ranks import EmulatedRanks
    from metainfer.comm.peers import Place
    from metainfer.executor.assemble import assemble
    from metainfer.executor.loading import tensor_source

    device, place = machine.torch_device(), Place(resolved.plan.layouts[0], 0)
    alone = EmulatedRanks(
        place,
        emulation.tree,
        device,
        method=emulation.method,
        experts=resolved.arch.routed_experts,
    )
    executor = assemble(
        resolved,
        tensor_source(model, device),
        machine.registry,
        device,
        trace=trace,
        place=place,
        ranks=alone.ranks,
    )
    executor.emulated = alone
    return executor


def _open_ranks(
    resolved: Resolved, machine: Machine, intent: Intent, note: Callable[[str], None]
) -> RankExecutor:
    from metainfer.comm import plan_file
    from metainfer.comm.driver import QUEUES
    from metainfer.engine.rank import facts_of, tiers_path
    from metainfer.executor.ranks import RankExecutor
    from metainfer.workers.ranks import ProcessGroup

    layout = resolved.plan.layouts[0]
    note(f"{layout.ranks} ranks")
    path = tiers_path(machine.fingerprint)
    kept, warnings = plan_file.read(path, machine.fingerprint)
    for warning in warnings:
        note(warning)
    if kept is not None and kept.tiers:
        note(f"collectives by {path}")
    tiers = plan_file.render(kept) if kept is not None else ""
    facts = [facts_of(intent, resolved, tiers)] * layout.ranks
    group = ProcessGroup.spawn(
        RANK,
        layout.ranks,
        facts=facts,
        start_s=START_S,
        environ=lambda rank: QUEUES,
    )
    return RankExecutor(group, layout, resolved.sizes.slots, resolved.plan.graphs)
