"""How fast a layout would be: what a step must read, compute and send (`steps`), and nothing else.

Uncalibrated, by `bound`. Its seeds are our own kernels' on one kind of card, so the band is wide.
With a record of this model's steps on this machine the band is that of the record. Where a rate is
unknown nothing is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.ledger import DecisionLedger, Origin
from metainfer.core.step import Phase
from metainfer.planner.bound import HIGH, LOW, Bound, bound
from metainfer.planner.calibration import Calibration
from metainfer.planner.held import Held
from metainfer.planner.layouts import prompt_domains
from metainfer.planner.steps import StepCost
from metainfer.planner.weights import Census
from metainfer.platform.facts import Facts

CONTEXT = PROMPT = 8192
"""Tokens that a decoding sequence sees, and tokens of a prompt, in predictions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Tokens per second over all ranks; None where a rate of the machine is unknown.

    `decode_tok_s`: of `batch` sequences at `context` tokens; `one_tok_s`: of one. `first_token_s`:
    of one prompt of `prompt` tokens on an idle machine. `assumed`: what stands in for facts.
    `band`: the ends of what is expected, over the value. `calibrated`: how the steps were measured,
    empty where they were not. `price_hour`: of the machine, by its file.
    """

    prefill_tok_s: float | None
    decode_tok_s: float | None
    one_tok_s: float | None
    first_token_s: float | None
    batch: int
    context: int
    prompt: int
    assumed: tuple[str, ...]
    band: tuple[float, float] = (LOW, HIGH)
    calibrated: str = ""
    price_hour: float | None = None

    def price(self, tok_s: float | None) -> float | None:
        """What a million tokens cost at that rate; None where it or the machine's price is not
        known."""
        return self.price_hour / 3600 / tok_s * 1e6 if self.price_hour and tok_s else None

    def to_json(self) -> dict[str, object]:
        measured = f"measured steps: {self.calibrated}"
        return {
            "basis": measured if self.calibrated else "roofline and communication model",
            "calibrated": bool(self.calibrated),
            "band": list(self.band),
            "batch": self.batch,
            "context": self.context,
            "prompt": self.prompt,
            "decode_one_tok_s": _rounded(self.one_tok_s),
            "first_token_s": _rounded(self.first_token_s),
            "prompt_price": _rounded(self.price(self.prefill_tok_s)),
            "answer_price": _rounded(self.price(self.decode_tok_s)),
            "assumed": list(self.assumed),
        }


def predict(
    counted: Census,
    held: Held,
    facts: Facts,
    dtype: str,
    *,
    running: int,
    step_tokens: int,
    cost: StepCost | None,
    calibration: Calibration | None = None,
) -> Prediction | None:
    """The speed of one layout; None where the family has no cost model or no rate is known.

    `cost`: what its steps cost (`step_cost`); `calibration`: measured steps of this very layout on
    this machine.
    """
    price: Bound | Calibration | None = calibration or bound(facts, dtype)
    if cost is None or price is None:
        return None
    context = min(CONTEXT, counted.arch.max_context)
    chunk = min(step_tokens, context)
    prefill = first = None
    if not isinstance(price, Bound) or price.rate is not None:
        seconds = price(Phase.CHUNK, cost.prefill(chunk, context))
        prefill = prompt_domains(held.layout) * chunk / seconds
        first = context / chunk * seconds
    band = (LOW, HIGH)
    if calibration is not None:
        band = (1 / (1 + calibration.band), 1 + calibration.band)
    return Prediction(
        prefill_tok_s=prefill,
        decode_tok_s=running / price(Phase.DECODE, cost.decode(running, context)),
        one_tok_s=1 / price(Phase.DECODE, cost.decode(1, context)),
        first_token_s=first,
        batch=running,
        context=context,
        prompt=context,
        assumed=cost.assumed,
        band=band,
        calibrated="" if calibration is None else calibration.origin,
        price_hour=facts.host.price_hour,
    )


def record_speed(ledger: DecisionLedger, prediction: Prediction | None) -> None:
    """Where the speeds of the plan's layout come from."""
    if prediction is None:
        why = "the family has no cost model, or the machine's rates are unknown"
        ledger.record("speed", "not predicted", Origin.DERIVED, why)
    elif prediction.calibrated:
        why = f"{prediction.calibrated}; within {prediction.band[1] - 1:.0%}"
        ledger.record("speed", "measured steps", Origin.RECORD, why)
    else:
        low, high = prediction.band
        why = f"bytes, FLOPs and links; no step was measured here: {low:g} to {high:g} of the value"
        ledger.record("speed", "cost model", Origin.COST_MODEL, why)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def rates(prediction: Prediction | None) -> tuple[float | None, float | None]:
    """(prefill, decode) tokens per second to four digits; None where nothing is predicted."""
    if prediction is None:
        return None, None
    return _rounded(prediction.prefill_tok_s), _rounded(prediction.decode_tok_s)
