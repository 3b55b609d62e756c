"""What was resolved for a model, as the checks of kernels, pages and layouts look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from metainfer.kernels.choice import Selection
from metainfer.kv.book.spec import CacheSpec, GroupSpec

if TYPE_CHECKING:
    from metainfer.planner.resolve import Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """`caches`: one description per layer's cache, borrowers included; empty where the plan was
    refused before caches were sized."""

    selection: Selection
    groups: tuple[GroupSpec, ...] = ()
    caches: tuple[CacheSpec, ...] = ()


def view_of(resolved: Resolved) -> ModelView:
    """The plan's view: the very objects that the engine is built from."""
    layouts = resolved.selection.bundle.layouts
    caches = resolved.arch.cache_specs(resolved.plan.model.dtype, layouts)
    return ModelView(selection=resolved.selection, groups=resolved.groups, caches=caches)
