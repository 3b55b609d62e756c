"""Conditions of the stock tables, in three values: a fact that is unknown makes them unknown.

``fact = value`` or a list of values; ``fact_not``; ``fact_min`` and ``fact_max``, both included.
Capabilities are written ``"8.9"`` and compared as pairs. All conditions of a row must hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SUFFIXES = ("_not", "_min", "_max")
CAPABILITY = "capability"


def fact_of(key: str) -> str:
    """The fact that a condition looks at."""
    return next((key[: -len(s)] for s in SUFFIXES if key.endswith(s)), key)


def holds(when: Mapping[str, Any], facts: Mapping[str, Any]) -> bool | None:
    """True, False, or None when it turns on a fact that is None. One False settles it.

    Raises:
        KeyError: a condition on a fact that nobody provides, which is a defect of the table.
    """
    answers = [_one(key, wanted, facts[fact_of(key)]) for key, wanted in when.items()]
    if False in answers:
        return False
    return None if None in answers else True


def unknown_facts(when: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """The facts that keep a row from being decided."""
    return [fact_of(key) for key in when if facts[fact_of(key)] is None]


def _one(key: str, wanted: Any, have: Any) -> bool | None:
    if have is None:
        return None
    values = [*wanted] if isinstance(wanted, list) else [wanted]
    if fact_of(key) == CAPABILITY:
        have, values = _pair(have), [_pair(value) for value in values]
    if key.endswith("_not"):
        return have not in values
    if key.endswith("_min"):
        return bool(have >= values[0])
    if key.endswith("_max"):
        return bool(have <= values[0])
    return have in values


def _pair(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)
