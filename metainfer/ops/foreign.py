"""Libraries of others, found when a kernel of theirs is asked for.

An adapter file in an op's folder calls one library, and its declaration names it
(`Impl.library`). Such a kernel is imported in a child process first, goes through the op's cases
and those of `FOREIGN` there, and serves only then; what stops it is a reason like any other.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from metainfer.core.errors import UserError


def library(name: str, *functions: str) -> ModuleType:
    """The module `name`, with all of `functions` in it.

    Raises:
        UserError: it cannot be imported, whatever it raised; or a function is not there.
    """
    remedy = f"Install a release of {name} for this torch and card, or none."
    try:
        found = importlib.import_module(name)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        what = f"{name} cannot be imported: {type(error).__name__}: {first}."
        raise UserError(what, remedy, code="foreign_library") from error
    missing = [each for each in functions if not callable(getattr(found, each, None))]
    if missing:
        version = getattr(found, "__version__", "of unknown version")
        what = f"{name} {version} has no {', '.join(missing)}."
        raise UserError(what, remedy, code="foreign_library")
    return found
