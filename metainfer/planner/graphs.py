"""Which decode steps are captured as graphs, and what stands against it."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.ledger import Loser
from metainfer.core.plan import DraftPlan
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason
from metainfer.kernels.select import Selection
from metainfer.planner.drafts import MODEL

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Token counts at which decode is captured, up to the most running sequences (seed)."""

CAPTURES = ("cuda",)
"""Kinds of device whose steps can be captured."""


@dataclass(frozen=True, slots=True)
class GraphChoice:
    """`buckets`: padded token counts, largest first; empty where decode runs op by op."""

    buckets: tuple[int, ...]
    why: str
    losers: tuple[Loser, ...] = ()


def decode_graphs(selection: Selection, device: str, running: int, draft: DraftPlan) -> GraphChoice:
    """Buckets up to `running`, or none and every op that prevents it.

    A draft model reads hidden rows, which graphs do not hand out; verify runs have no graphs.

    Sampling runs outside the graph. Largest first, so that captures share the largest one's memory.
    """
    if device not in CAPTURES:
        return GraphChoice((), f"steps on {device} are not captured")
    if draft.method == MODEL:
        return GraphChoice((), "decode runs op by op: the draft model reads its hidden rows")
    unsafe = {
        choice.impl.id: Reason(
            "graph", f"{choice.impl.id} at {choice.request.site} cannot be captured"
        )
        for choice in selection.bundle.choices
        if choice.request.phase is Phase.DECODE
        and choice.request.op != "sample"
        and not choice.impl.graph_safe
    }
    if unsafe:
        loser = Loser("decode graphs", tuple(unsafe.values()))
        return GraphChoice((), "decode runs op by op: it pays every launch", (loser,))
    losers: tuple[Loser, ...] = ()
    if draft.depth:
        eager = Reason("not-built", "verify runs pay every launch: they are not captured yet")
        losers = (Loser("verify graphs", (eager,)),)
    reached = [bucket for bucket in BUCKETS if bucket < running]
    buckets = tuple(sorted({*reached, running}, reverse=True))
    return GraphChoice(buckets, "seed, up to concurrency", losers)
