"""Tuned tables of experts that a stock engine looks up by the card's full product name (B-07).

Three names of one chip miss each other's tables, silently. Whether there is one is looked up in the
installed package; a name that did not come from the driver is no key to look up.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"E=(\d+),N=(\d+),device_name=([^,]+?)(?:,.*)?\.json")


@dataclass(frozen=True, slots=True)
class TableSearch:
    """`found`: the file; None for no table. `known`: False when it could not be looked up."""

    wanted: str
    found: str | None
    known: bool
    near: tuple[str, ...] = ()


def wanted_name(experts: int, width: int, device: str) -> str:
    """The part of the file's name that decides."""
    return f"E={experts},N={width},device_name={device.replace(' ', '_')}"


def search(facts: Mapping[str, Any], device: str, folder: Path | None) -> TableSearch | None:
    """Look up the table of a model's experts after the split; None for a model without experts.

    `folder`: the installed package, None when it is not installed.
    """
    experts, width, tp = (facts.get(name) for name in ("experts", "moe_intermediate", "tp"))
    if not experts or not width or not tp:
        return None
    wanted = wanted_name(experts, width // tp, device)
    if folder is None:
        return TableSearch(wanted, None, False)
    names = [path.name for path in folder.rglob("E=*,N=*,device_name=*.json")]
    exact = next((name for name in names if name.startswith((f"{wanted},", f"{wanted}."))), None)
    return TableSearch(wanted, exact, True, _near(names, experts, width // tp))


def _near(names: Iterable[str], experts: int, width: int) -> tuple[str, ...]:
    """Cards that have a table of this shape."""
    found = set()
    for name in names:
        parts = _NAME.fullmatch(name)
        if parts is not None and (int(parts[1]), int(parts[2])) == (experts, width):
            found.add(parts[3])
    return tuple(sorted(found))


def package_folder(package: str) -> Path | None:
    """Where a package is installed, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
