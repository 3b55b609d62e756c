"""Adapters in a plan: who asked for them, what each weighs."""

from __future__ import annotations

from metainfer.core.ledger import DecisionLedger, Origin
from metainfer.core.plan import AdapterPlan, LedgerRow
from metainfer.models.common.adapters import AdapterSet


def adapter_plans(found: AdapterSet | None) -> tuple[AdapterPlan, ...]:
    """One entry per adapter, in the order of their places."""
    if found is None:
        return ()
    return tuple(
        AdapterPlan(name=each.name, digest=each.digest, rank=each.rank) for each in found.adapters
    )


def record(ledger: DecisionLedger, found: AdapterSet | None, origin: Origin) -> None:
    """Their names, number and largest rank, and what each says of itself."""
    if found is None:
        ledger.record("adapters", "none", Origin.DEFAULT, "none was asked for")
        return
    ledger.record("adapters", [each.name for each in found.adapters], origin, "asked for")
    why = "all are loaded at start and may stand in one batch"
    ledger.record("adapters.max_count", found.count, Origin.DERIVED, why)
    why = "the largest of them; smaller ones are padded to it, matrix by matrix"
    ledger.record("adapters.max_rank", found.rank, Origin.DERIVED, why)
    for each in found.adapters:
        trained = f"trained on {each.base!r} by its own word" if each.base else "base not named"
        why = f"rank {each.rank} on {len(each.modules)} modules; {trained}"
        ledger.record(f"adapters.{each.name}", each.digest, Origin.CHECKPOINT, why)


def adapter_rows(found: AdapterSet | None, width: int) -> list[LedgerRow]:
    """An equal share of the common storage each, and what its own pairs need of it.

    `width`: bytes of one element of the model's type.
    """
    if found is None:
        return []
    share, rest = divmod(found.held_bytes(width), found.count)
    return [
        LedgerRow(
            item=f"adapter {each.name}",
            kind="weights",
            bytes=share + (rest if place == 0 else 0),
            logical_bytes=found.needed_bytes(each, width),
            share="whole" if found.whole else "cut like their matrices",
        )
        for place, each in enumerate(found.adapters)
    ]
