"""What a goal compares of layouts: the best by it, why, and what each other one lost by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from metainfer.core.ledger import Origin
from metainfer.core.verdict import Reason
from metainfer.planner.candidate import Candidate
from metainfer.planner.phases import ANSWER, request_seconds
from metainfer.planner.predict import PROMPT


@dataclass(frozen=True, slots=True)
class _Scale:
    """What a goal compares: larger is better. `unit` for people."""

    value: Callable[[Candidate], float | None]
    unit: str


def _predicted(name: str, sign: int = 1) -> Callable[[Candidate], float | None]:
    def value(candidate: Candidate) -> float | None:
        found = getattr(candidate.prediction, name, None)
        return None if found is None else sign * float(found)

    return value


def _requests(candidate: Candidate) -> float | None:
    """Usual requests a second: decodes alone would take a layout whose prompts last for ever."""
    found = None if candidate.prediction is None else request_seconds(candidate.prediction)
    return None if found is None else 1 / found


_CACHE = _Scale(lambda c: float(c.held.kv_tokens) if c.held else None, "cached tokens")
_SCALES = {
    "throughput": (
        _Scale(_requests, f"requests/s of {PROMPT:,} and {ANSWER} tokens"),
        _Scale(_predicted("decode_tok_s"), "decoded tok/s (no matrix rate is known)"),
        _CACHE,
    ),
    "latency": (_Scale(_predicted("one_tok_s"), "tok/s of one sequence"), _CACHE),
    "ttft": (
        _Scale(_predicted("first_token_s", -1), "s to the first token"),
        _Scale(_predicted("one_tok_s"), "tok/s of one sequence (no matrix rate is known)"),
        _CACHE,
    ),
    "context": (
        _Scale(lambda c: None if c.longest is None else float(c.longest), "tokens of a sequence"),
        _CACHE,
    ),
}


def _scales(goal: str, feasible: Sequence[Candidate]) -> tuple[_Scale, ...]:
    """What is known of all: a layout must not win because something is unknown of another."""
    return tuple(
        scale for scale in _SCALES[goal] if all(scale.value(c) is not None for c in feasible)
    )


def best_for(feasible: Sequence[Candidate], goal: str) -> Candidate:
    """First by the goal; ties by what the goal asks next, then by fewer cards."""
    scales = _scales(goal, feasible)

    def key(candidate: Candidate) -> tuple[float, ...]:
        return tuple(scale.value(candidate) or 0.0 for scale in scales)

    return max(feasible, key=key)


def by(best: Candidate) -> Origin:
    """Where a decision for `best` comes from."""
    return Origin.COST_MODEL if best.prediction is not None else Origin.DERIVED


def why(goal: str, best: Candidate, feasible: Sequence[Candidate]) -> str:
    """What the goal asks of layouts, and how much of it `best` gives."""
    scale = _scales(goal, feasible)[0]
    value = scale.value(best)
    assert value is not None
    shown = f"{goal}: {abs(value):,.4g} {scale.unit}"
    return shown if scale is _CACHE else f"{shown}, {_basis(scale)}"


def _basis(scale: _Scale) -> str:
    return "from the ledger" if scale.unit == "tokens of a sequence" else "predicted, uncalibrated"


def lost(
    each: Candidate, winner: Candidate, goal: str, feasible: Sequence[Candidate]
) -> tuple[Reason, ...]:
    """Why a layout was not taken: what it cannot, what it is worse at, what is not built."""
    if not each.feasible:
        return each.reasons
    reasons = []
    if winner.feasible:
        scales = _scales(goal, feasible)
        differing = [s for s in scales if s.value(each) != s.value(winner)]
        scale = differing[0] if differing else scales[0]
        mine, best = scale.value(each), scale.value(winner)
        assert mine is not None and best is not None
        if mine <= best:
            text = f"{abs(mine):,.4g} {scale.unit} against {abs(best):,.4g} of {winner.layout.name}"
            code = "rank" if mine == best else "worse"
            reasons.append(Reason(code, text, {"value": abs(mine), "best": abs(best)}))
    reasons += each.planned_only
    return tuple(reasons) or (Reason("rank", f"{winner.layout.name} was asked for"),)
