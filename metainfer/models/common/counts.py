"""Sums that several families' costs are made of: keys under a cap, experts that a batch touches."""

from __future__ import annotations


def capped_sum(count: int, cap: int) -> float:
    """Sum of min(t, cap) over t = 1 .. count: keys that a prompt of `count` tokens reads where a
    token reads `cap` at most."""
    ramp = min(count, cap)
    return ramp * (ramp + 1) / 2 + (count - ramp) * float(cap)


def distinct_experts(experts: int, per_token: int, tokens: int) -> float:
    """Of `experts`, how many `tokens` tokens touch together under uniform routing."""
    missed = (1 - per_token / experts) ** tokens
    return experts * (1 - missed)
