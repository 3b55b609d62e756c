"""The grammar libraries that there are: what each cannot express, and how one is opened.

Which one serves is a decision of the plan (`planner.grammars`); server, checking process and engine
then name it here. None is imported before it is opened.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from metainfer.core.errors import RequestError
from metainfer.grammar.backend import Backend, Vocabulary

LLGUIDANCE, XGRAMMAR, NONE = "llguidance", "xgrammar", "none"


@dataclass(frozen=True, slots=True)
class Known:
    """A library, which is also the name of its package. `extra`: what installs it. `start_s`: how
    long its first grammar may take to be checked. `cannot`: what it refuses, in words."""

    extra: str
    start_s: float
    cannot: tuple[str, ...]


#: In order of preference.
KNOWN: Mapping[str, Known] = {
    LLGUIDANCE: Known(
        "grammar",
        5.0,
        (
            "'not', 'if', 'uniqueItems', 'contains', 'propertyNames', 'dependentRequired', and "
            "'oneOf' of what may both hold, in a schema",
            "look-around, word boundaries and back-references in patterns",
        ),
    ),
    XGRAMMAR: Known(
        "xgrammar",
        30.0,
        (
            "'allOf', 'oneOf', 'multipleOf', 'patternProperties' in a schema, and bounds beside "
            "'$ref', 'anyOf', 'enum' or 'const'",
            "properties beside those that a schema describes",
            "escapes in texts under a pattern or of bounded length",
            "patterns that are not anchored, Unicode classes, look-around",
            "free text before a call whose marker is no token of the vocabulary",
        ),
    ),
}


def require(name: str) -> None:
    """Refuse what needs a grammar where the plan's library is not there.

    Raises:
        RequestError: 400 ``unsupported_parameter`` with the remedy.
    """
    if name == NONE or importlib.util.find_spec(name) is None:
        known = KNOWN.get(name, KNOWN[LLGUIDANCE])
        package = name if name in KNOWN else LLGUIDANCE
        raise RequestError(
            f"Structured output and enforced calls need the package {package}, which is not here.",
            f"Install it where the server runs: pip install 'metainfer[{known.extra}]'.",
            code="unsupported_parameter",
        )


def opened(name: str, vocabulary: Vocabulary) -> Backend:
    """The library `name` over `vocabulary`; it is imported now."""
    if name == XGRAMMAR:
        from metainfer.grammar.xgr import XGrammar

        return XGrammar(vocabulary)
    from metainfer.grammar.llg import LLGuidance

    return LLGuidance(vocabulary)
