"""What ranks of a layout meet through, in the memory ledger."""

from __future__ import annotations

from metainfer.comm.plan import AUTO
from metainfer.comm.rooms import longest_bytes, room_of
from metainfer.core.intent import Intent
from metainfer.core.plan import LayoutPlan, LedgerRow
from metainfer.planner.layouts import talks
from metainfer.platform.facts import CPU, Facts

NCCL_BYTES = 64 << 20
"""What NCCL keeps for a group (seed)."""


def room_rows(
    layout: LayoutPlan, facts: Facts, intent: Intent, step_tokens: int, row_bytes: int
) -> list[LedgerRow]:
    """On the card and pinned in host memory, a rank's part. `row_bytes`: of a token's activations;
    0 where the family does not say."""
    if not talks(layout):
        return []
    pairs = [link for link in facts.links if link.source >= 0]
    peers = bool(pairs) and all(link.peer_write for link in pairs)
    method = "shm_cpu" if facts.device.kind == CPU else intent.collectives or AUTO
    if method == "nccl":
        item = "buffers of NCCL (seed)"
        return [LedgerRow(item=item, kind="communication", bytes=NCCL_BYTES)]
    longest = longest_bytes(layout, step_tokens, row_bytes)
    room = room_of(layout, longest, peers=peers or intent.one_card, method=method)
    rows = (
        ("messages between ranks", room.device, "device"),
        ("slabs and staging memory between ranks", room.pinned, "pinned"),
    )
    return [
        LedgerRow(item=item, kind="communication", bytes=held, memory=memory)
        for item, held, memory in rows
        if held
    ]
