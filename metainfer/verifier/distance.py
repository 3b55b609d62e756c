"""How far two distributions over the next token are apart, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

#: Of the mean log-probability distance, in nats: what other orders of sums leave after the layers.
#: ``rounded``: plans whose recipe rounds activations to e4m3. A value beside the middle of two such
#: numbers goes either way, a sixteenth of it, and few do: means of two runs differ by far more.
FLOORS: Mapping[str, float] = MappingProxyType(
    {"float64": 1e-12, "float32": 1e-6, "float16": 2e-4, "bfloat16": 2e-3, "rounded": 2e-2}
)
#: How near two router scores may be to count as tied.
NEAR: Mapping[str, float] = MappingProxyType(
    {"float64": 1e-9, "float32": 3e-5, "float16": 1e-2, "bfloat16": 6e-2, "rounded": 6e-2}
)
FACTOR = 1.25
WORST_FACTOR = 4.0
"""Of the worst of some hundred values: two runs of equal quality differ by that much."""
TOP = 20


@dataclass(frozen=True, slots=True)
class Distance:
    """Of log-probabilities (over the reference's `TOP` best tokens and the next one): mean and
    worst. `kl`: the mean of KL(reference || candidate). All in nats. `rows` compared."""

    mean: float
    worst: float
    kl: float
    rows: int


def distance(logits: Tensor, reference: Tensor, following: Tensor) -> Distance:
    """Both [R, V] float64; `following` [R] int64: the token that came next."""
    mine, truth = logits.log_softmax(-1), reference.log_softmax(-1)
    if not bool(mine.isfinite().all()):
        return Distance(float("inf"), float("inf"), float("inf"), len(logits))
    best = truth.topk(min(TOP, truth.shape[1]), dim=-1).indices
    ids = torch.cat((best, following.unsqueeze(1)), dim=1)
    off = (mine.gather(1, ids) - truth.gather(1, ids)).abs()
    kl = (truth.exp() * (truth - mine)).sum(-1)
    return Distance(off.mean().item(), off.max().item(), max(kl.mean().item(), 0.0), len(logits))


def disagreements(logits: Tensor, reference: Tensor, tie: float) -> tuple[int, int]:
    """Rows whose best token differs, and how many of these are near ties: the reference puts the
    two at most `tie` nats apart."""
    truth = reference.log_softmax(-1)
    mine, theirs = logits.argmax(-1), truth.argmax(-1)
    differ = (mine != theirs).nonzero().flatten()
    gap = truth[differ, theirs[differ]] - truth[differ, mine[differ]]
    return len(differ), int((gap <= tie).sum())


def tolerances(recipe: Distance, grade: str) -> Distance:
    """What a candidate may have, given the recipe's own distance. KL goes with its square.

    `grade`: the plan's type, or ``rounded``.
    """
    floor = FLOORS[grade]
    mean = max(FACTOR * recipe.mean, floor)
    return Distance(
        mean,
        max(WORST_FACTOR * recipe.worst, 20 * floor),
        max(FACTOR**2 * recipe.kl, mean**2),
        recipe.rows,
    )
