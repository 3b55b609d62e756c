"""Which layout each phase would take for itself, and which one serves both best.

Prompts and decodes want other layouts: the first compute, the second read and exchange small
messages. Apart they could only run with weights cut both ways; the plan says what that would gain.
Jointly, a layout is judged by the time of a usual request in it: `PROMPT` tokens computed and
`ANSWER` tokens decoded at the predicted rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from metainfer.core.ledger import DecisionLedger, Loser, Origin
from metainfer.core.plan import LayoutPlan
from metainfer.core.verdict import Reason
from metainfer.planner.predict import PROMPT, Prediction

ANSWER = 512
"""Tokens of a usual answer (seed)."""


class Judged(Protocol):
    """A feasible layout with its prediction."""

    @property
    def layout(self) -> LayoutPlan: ...

    @property
    def prediction(self) -> Prediction | None: ...


Rate = Callable[[Prediction], float | None]


def request_seconds(prediction: Prediction) -> float | None:
    """Of one usual request's share of the machine; None where a rate is unknown."""
    if not prediction.prefill_tok_s or not prediction.decode_tok_s:
        return None
    return PROMPT / prediction.prefill_tok_s + ANSWER / prediction.decode_tok_s


def record_phases(ledger: DecisionLedger, feasible: Sequence[Judged]) -> None:
    """Write ``prefill_layout``, ``decode_layout`` and ``joint_layout`` down.

    Each loser has its own number. Where a rate is unknown, so is the answer.
    """

    def joint(prediction: Prediction) -> float | None:
        seconds = request_seconds(prediction)
        return None if seconds is None else 1 / seconds

    prefill = _record(
        ledger, "prefill_layout", feasible, lambda p: p.prefill_tok_s, "tokens of prompts a second"
    )
    decode = _record(
        ledger, "decode_layout", feasible, lambda p: p.decode_tok_s, "decoded tokens a second"
    )
    usual = f"requests of {PROMPT:,} and {ANSWER} tokens a second"
    both = _record(ledger, "joint_layout", feasible, joint, usual, unless=(prefill, decode))
    if prefill is None or decode is None or both is None:
        return
    apart = PROMPT / _rate(prefill, lambda p: p.prefill_tok_s)
    apart += ANSWER / _rate(decode, lambda p: p.decode_tok_s)
    gain = _rate(both, request_seconds) / apart - 1
    ledger.record(
        "phases_apart",
        f"{prefill.layout.name} and {decode.layout.name}",
        Origin.COST_MODEL,
        f"{gain:.0%} more than {both.layout.name} for both, if the weights were held both ways",
    )


def _record(
    ledger: DecisionLedger,
    key: str,
    feasible: Sequence[Judged],
    rate: Rate,
    unit: str,
    unless: tuple[Judged | None, ...] = (),
) -> Judged | None:
    """Decide one; the earlier of equals, which has fewer cards."""
    known = [each for each in feasible if each.prediction is not None and rate(each.prediction)]
    if len(known) < len(feasible) or not known or None in unless:
        ledger.record(key, "unknown", Origin.DERIVED, "a rate of the machine is unknown")
        return None
    best = max(known, key=lambda each: _rate(each, rate))
    losers = tuple(
        Loser(each.layout.name, (Reason("worse", f"{_rate(each, rate):,.4g} {unit}"),))
        for each in known
        if each is not best
    )
    why = f"{_rate(best, rate):,.4g} {unit}, predicted, for this phase alone"
    if key == "joint_layout":
        why = f"{_rate(best, rate):,.4g} {unit}, predicted, in one layout"
    ledger.record(key, best.layout.name, Origin.COST_MODEL, why, losers)
    return best


def _rate(each: Judged, rate: Rate) -> float:
    assert each.prediction is not None
    return float(rate(each.prediction) or 0.0)
