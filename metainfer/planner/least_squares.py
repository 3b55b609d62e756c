"""Least squares of few columns with coefficients that are not negative."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def not_negative(columns: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """Least squares with coefficients >= 0: the best of all supports, since there are few."""
    best, least = [0.0] * len(columns), math.inf
    for size in range(1, len(columns) + 1):
        for support in itertools.combinations(range(len(columns)), size):
            found = _least_squares([columns[i] for i in support], target)
            if found is None or min(found) < 0:
                continue
            error = 0.0
            for row, wanted in enumerate(target):
                sum_ = sum(x * columns[i][row] for x, i in zip(found, support, strict=True))
                error += (sum_ - wanted) ** 2
            if error < least - 1e-12:
                least, best = error, [0.0] * len(columns)
                for x, i in zip(found, support, strict=True):
                    best[i] = x
    return best


def _least_squares(
    columns: Sequence[Sequence[float]], target: Sequence[float]
) -> list[float] | None:
    """Solve the normal equations of scaled columns; None where they are dependent."""
    scale = [math.sqrt(sum(x * x for x in column)) for column in columns]
    if min(scale) == 0 or len(columns) > len(target):
        return None
    unit = [[x / s for x in column] for column, s in zip(columns, scale, strict=True)]
    size = len(unit)
    rows = [
        [sum(a * b for a, b in zip(unit[i], unit[j], strict=True)) for j in range(size)]
        + [sum(a * b for a, b in zip(unit[i], target, strict=True))]
        for i in range(size)
    ]
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda r: abs(rows[r][pivot]))
        rows[pivot], rows[best] = rows[best], rows[pivot]
        if abs(rows[pivot][pivot]) < 1e-9:
            return None
        for other in range(size):
            if other != pivot:
                factor = rows[other][pivot] / rows[pivot][pivot]
                rows[other] = [
                    a - factor * b for a, b in zip(rows[other], rows[pivot], strict=True)
                ]
    return [rows[i][size] / rows[i][i] / scale[i] for i in range(size)]
