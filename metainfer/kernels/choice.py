"""What may be chosen, what was, and everything that lost: the words in which selection answers.

Data alone. `select` fills it in, the planner decides by it, `doctor` and `plan` show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from metainfer.core.verdict import Reason
from metainfer.kernels.impl import Evidence, Impl, OpRequest, Quality
from metainfer.kernels.tuning import Tuned, nothing_tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What may be chosen.

    `pins`: op or site, ``op@phase`` for one phase -> implementation name, from the user; a pin that
    cannot run is an error. `layout_pins`: role -> layout identifier, from the user.
    `evidence`: implementation id -> what is known about it on this machine. `allow_fallback`: ops
    for which a `REFERENCE` implementation may be chosen by ``auto``; ``all`` allows every one.
    `min_evidence`: the weakest evidence that ``auto`` accepts. `disproven`: id -> how its cases
    failed on this machine; not even a pin takes it. `allow_lossy`: ids opted in.
    `measured`: (implementation id, phase) -> seconds from a record of this machine. `tuned`: how
    an implementation is launched for a request, from records, and its seconds where it was measured
    for the very shape.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    layout_pins: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    allow_fallback: frozenset[str] = frozenset()
    min_evidence: Evidence = Evidence.OTHER_CARD
    disproven: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    allow_lossy: frozenset[str] = frozenset()
    measured: Mapping[tuple[str, str], float] = field(default_factory=dict)
    tuned: Callable[[Impl, OpRequest], Tuned | None] = nothing_tuned


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation that lost, and every reason why."""

    impl: str
    reasons: tuple[Reason, ...]
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner at one (site, phase). `slowdown`: its cost over that of the cheapest known
    implementation, rejected ones included; None where either cost is unknown or that one costs
    nothing. `tuned`: how it is launched, where a record says."""

    request: OpRequest
    impl: Impl
    quality: Quality
    evidence: Evidence
    why: str
    rejected: tuple[Candidate, ...]
    seconds: float | None = None
    slowdown: float | None = None
    tuned: Tuned | None = None


@dataclass(frozen=True, slots=True)
class Unserved:
    """A (site, phase) with no implementation, and all reasons of all candidates.

    `pin`: the implementation that was asked for there; it is then the only candidate.
    """

    request: OpRequest
    rejected: tuple[Candidate, ...]
    pin: str = ""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A feasible set of shared layouts with the choice at every site and phase. `seconds`: of a
    token of an answer."""

    layouts: Mapping[str, str]
    choices: tuple[Choice, ...]
    seconds: float | None = None

    @property
    def name(self) -> str:
        return bundle_name(self.layouts)


@dataclass(frozen=True, slots=True)
class RefusedBundle:
    """A candidate bundle that lost, with reasons (unserved sites, or a higher cost)."""

    layouts: Mapping[str, str]
    reasons: tuple[Reason, ...]
    unserved: tuple[Unserved, ...] = ()

    @property
    def name(self) -> str:
        return bundle_name(self.layouts)


@dataclass(frozen=True, slots=True)
class Selection:
    """The winning bundle and the losers; `others`: the feasible ones among them, fastest first."""

    bundle: Bundle
    refused: tuple[RefusedBundle, ...]
    others: tuple[Bundle, ...] = ()


def bundle_name(layouts: Mapping[str, str]) -> str:
    return " + ".join(layouts[role] for role in sorted(layouts)) or "none"
