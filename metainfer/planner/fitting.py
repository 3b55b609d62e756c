"""The fastest feasible bundle may not fit: the next one is tried, and the record says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from metainfer.core.errors import RefusedError
from metainfer.kernels.choice import Bundle, RefusedBundle, Selection

T = TypeVar("T")

DOES_NOT_FIT = "does_not_fit"


def first_that_fits(selection: Selection, attempt: Callable[[Bundle], T]) -> tuple[Selection, T]:
    """The selection with the first bundle, fastest first, that `attempt` can hold in memory.

    `attempt` raises `RefusedError` (``does_not_fit``) when weights or caches in a bundle's layouts
    are too large.

    Raises:
        RefusedError: nothing fits; that of the bundle which lacks the least.
    """
    failed: list[tuple[RefusedBundle, RefusedError]] = []
    for bundle in (selection.bundle, *selection.others):
        try:
            result = attempt(bundle)
        except RefusedError as error:
            if error.code != DOES_NOT_FIT:
                raise
            failed.append((RefusedBundle(bundle.layouts, error.reasons), error))
            continue
        large = tuple(refused for refused, _ in failed)
        names = {refused.name for refused in large} | {bundle.name}
        others = tuple(other for other in selection.others if other.name not in names)
        refused = tuple(lost for lost in selection.refused if lost.name not in names)
        return Selection(bundle, (*large, *refused), others), result
    raise min((error for _, error in failed), key=_lacking)


def _lacking(error: RefusedError) -> int:
    """Bytes that were short, over all reasons."""
    short = 0
    for reason in error.reasons:
        need, have = reason.data.get("need"), reason.data.get("have")
        if isinstance(need, int) and isinstance(have, int):
            short += need - have
    return short
