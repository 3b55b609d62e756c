"""Which platforms were asked and why the others lost: falling to the processor is never unseen."""

from __future__ import annotations

from metainfer.doctor.finding import Finding, information
from metainfer.doctor.inputs import Inputs


def check(inputs: Inputs) -> list[Finding]:
    if inputs.local is None:
        return []
    chosen = inputs.facts.platform
    return [
        information(
            "platform.passed-over",
            f"platform {loser.value}",
            f"{'; '.join(reason.message for reason in loser.reasons)}. Running on {chosen}.",
            f"--platform {loser.value} makes this an error.",
            "; ".join(f"{reason.code}: {reason.message}" for reason in loser.reasons),
        )
        for loser in inputs.local.platform_losers
        if any(reason.code != "rank" for reason in loser.reasons)
    ]
