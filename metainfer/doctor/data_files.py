"""The tables that checks and the stock audit read: TOML in ``data/``, each row with its origin."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any


@cache
def load(name: str) -> dict[str, Any]:
    """The file as TOML gives it. Ours, so a mistake in it is a defect and raises."""
    return tomllib.loads((resources.files("metainfer.doctor") / "data" / name).read_text("utf-8"))


def rows(name: str, table: str) -> list[dict[str, Any]]:
    """The rows of ``[[table]]``; every one names its origin."""
    listed: list[dict[str, Any]] = load(name)[table]
    assert all(row.get("origin") for row in listed)
    return listed
