"""The registry that ships: every op folder's declarations, in folder order. Imports no torch.

A declaration that cannot be imported is fatal, never a candidate that disappears.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from functools import cache
from types import ModuleType

from metainfer import ops
from metainfer.core.errors import InternalError
from metainfer.kernels.registry import Registry
from metainfer.kernels.variant import Variant


def folders() -> tuple[str, ...]:
    """Names of the op folders, sorted."""
    modules = pkgutil.iter_modules(ops.__path__)
    return tuple(sorted(module.name for module in modules if module.ispkg))


def builtin_registry() -> Registry:
    """Collect ``IMPLS`` and ``LAYOUTS`` of each ``ops/<op>/impls.py``."""
    registry = Registry()
    for folder in folders():
        declared = importlib.import_module(f"metainfer.ops.{folder}.impls")
        for layout in getattr(declared, "LAYOUTS", ()):
            registry.add_layout(layout)
        for impl in declared.IMPLS:
            registry.add(impl)
    return registry


def all_variants() -> tuple[Variant, ...]:
    """Every ``VARIANTS`` of the folders that have an ``audit`` module: what is cross-compiled."""
    found: list[Variant] = []
    for folder in folders():
        name = f"metainfer.ops.{folder}.audit"
        if importlib.util.find_spec(name) is not None:
            found += importlib.import_module(name).VARIANTS
    return tuple(found)


@cache
def op_cases(op: str) -> ModuleType:
    """The ``cases`` module that holds `op`: ``CASES``, ``REFERENCES``, ``RECIPES`` by op.

    Imports torch. Raises `InternalError` when no folder has cases for it.
    """
    for folder in folders():
        module = importlib.import_module(f"metainfer.ops.{folder}.cases")
        if op in module.CASES:
            return module
    raise InternalError(f"no folder has cases for {op}")
