"""Which layout each phase would take for itself, and which one serves both best.

Prompts and decodes want other layouts: the first compute, the second read and exchange small
messages. A pair of layouts holds one copy of the weights for both; any other two could only run
with weights cut both ways, and the plan says what that would gain. Jointly, a layout is judged by
the time of a usual request in it: `PROMPT` tokens computed and `ANSWER` tokens decoded at the
predicted rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from metainfer.core.ledger import DecisionLedger, Loser, Origin
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
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
        f"{_name('prefill_layout', prefill)} and {_name('decode_layout', decode)}",
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
    losers = {
        name: Loser(name, (Reason("worse", f"{_rate(each, rate):,.4g} {unit}"),))
        for each in known[::-1]  # of a half that several pairs share, the first counts
        if (name := _name(key, each)) != _name(key, best)
    }
    why = f"{_rate(best, rate):,.4g} {unit}, predicted, for this phase alone"
    if key == "joint_layout":
        why = f"{_rate(best, rate):,.4g} {unit}, predicted, with one copy of the weights"
    ledger.record(key, _name(key, best), Origin.COST_MODEL, why, tuple(losers.values())[::-1])
    return best


def _name(key: str, each: Judged) -> str:
    """As the decision calls it: one half of a pair where it is about one phase."""
    phase = {"prefill_layout": Phase.CHUNK, "decode_layout": Phase.DECODE}.get(key)
    return each.layout.name if phase is None else each.layout.phase_name(phase)


def _rate(each: Judged, rate: Rate) -> float:
    assert each.prediction is not None
    return float(rate(each.prediction) or 0.0)
