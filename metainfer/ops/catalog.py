"""The registry that ships: every op folder's declarations, in folder order. Imports no torch.

A declaration that cannot be imported is fatal, never a candidate that disappears.
"""

from __future__ import annotations

import importlib
import pkgutil

from metainfer import ops
from metainfer.kernels.registry import Registry


def builtin_registry() -> Registry:
    """Collect ``IMPLS`` and ``LAYOUTS`` of each ``ops/<op>/impls.py``."""
    registry = Registry()
    for module in sorted(pkgutil.iter_modules(ops.__path__), key=lambda item: item.name):
        if not module.ispkg:
            continue
        declared = importlib.import_module(f"metainfer.ops.{module.name}.impls")
        for layout in getattr(declared, "LAYOUTS", ()):
            registry.add_layout(layout)
        for impl in declared.IMPLS:
            registry.add(impl)
    return registry
