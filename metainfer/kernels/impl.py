"""A declared implementation of an op: what it needs, what it honours, what proves it.

Declarations live in ``ops/<op>/impls.py`` and import neither torch nor the kernel: `load` is a
``module:attribute`` string. Whoever lists a kernel here can be planned for without a device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from metainfer.core.step import Phase
from metainfer.core.verdict import Verdict
from metainfer.platform.facts import Facts

ALL_PHASES = frozenset(Phase)


class Numerics(StrEnum):
    """`exact`: fp32 accumulation in a declared order. `native`: the recipe's or vendor's own
    rounding. `lossy`: only by explicit option."""

    EXACT = "exact"
    NATIVE = "native"
    LOSSY = "lossy"


class Quality(StrEnum):
    """What `doctor` prints. Derived from provider, facts and evidence, never declared."""

    NATIVE = "native"
    COMPATIBLE = "compatible"
    REFERENCE = "reference"


class Evidence(StrEnum):
    """How we know that it works. Ordered from strongest to weakest."""

    THIS_CARD = "ran on this card"
    OTHER_CARD = "ran on another architecture"
    COMPILED = "compiled only"
    NONE = "none"

    @property
    def strength(self) -> int:
        return len(Evidence) - list(Evidence).index(self)


@dataclass(frozen=True, slots=True)
class OpRequest:
    """One use of an op by a model, in one phase class.

    `site` tells uses of the same op apart (``linear.qkv``, ``linear.down``); it is the key that
    the run-time table is looked up by. `shape`: named extents, with `rows` the most tokens the
    phase can bring. `dtype`: the activation type. `semantics`: what the model requires and an
    implementation must honour (``bias``, ``clamp``, ``sink``, ``window`` ...).
    `schemes`: storage schemes of the weights at this site, as found in the checkpoint.
    `count`: how often a step calls this site, for totals.
    """

    op: str
    site: str
    phase: Phase
    dtype: str
    shape: Mapping[str, int]
    semantics: frozenset[str] = frozenset()
    schemes: tuple[str, ...] = ()
    count: int = 1

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for equal requests."""
        shape = tuple(self.shape.items())
        named = (self.op, self.site, self.phase, self.dtype)
        return (*named, shape, self.semantics, self.schemes, self.count)


@dataclass(frozen=True, slots=True)
class Context:
    """All that a condition may look at."""

    request: OpRequest
    facts: Facts
    # Role -> layout id of the bundle, of the roles that any candidate of the op requires.
    layouts: Mapping[str, str] = field(default_factory=dict)


Condition = Callable[[Context], Verdict]


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to launch an implementation: keyword arguments of its function (numbers, or tables
    of numbers), and the shared memory that a block then takes."""

    values: Mapping[str, Any]
    shared_bytes: int = 0

    @property
    def text(self) -> str:
        """As people read it."""
        return " ".join(f"{name}={value}" for name, value in self.values.items()) or "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """One candidate for one op.

    `requires_layout`: role -> layout id (``weight`` -> ``onednn-f32@1``); the bundle must offer
    exactly it. `honours`: semantics beyond the op's basic contract. `native_when`: the conditions
    under which it runs on the device's own instructions for its element type; empty means it is a
    portable path (`COMPATIBLE`). `cost`: predicted seconds of one call, for ranking and for the
    slowdown column. `tile`: facts read from the same table that the kernel compiles from.
    `settings`: what its function may be launched with, for `tune kernels`; the first is what it
    does by itself. `rounds`: ``module:function`` of rows and weight that does what it does to rows
    first; it takes the result for them, so ranks may send that. Empty: it takes rows as they are.
    `copies`: bytes of caches that a chunk's call copies at most, for the memory ledger. `by_table`:
    its cost follows the width of the page table, which in a captured step has room for the longest
    context. `priority` breaks ties between equal costs, higher first. `library`: whose
    kernel it is, by its name in `Facts.software`; such a one is proven in a child process only,
    and again with another version.
    """

    op: str
    name: str
    load: str
    provider: str
    dtypes: frozenset[str]
    phases: frozenset[Phase] = ALL_PHASES
    conditions: tuple[Condition, ...] = ()
    requires_layout: Mapping[str, str] = field(default_factory=dict)
    honours: frozenset[str] = frozenset()
    native_when: tuple[Condition, ...] = ()
    numerics: Numerics = Numerics.EXACT
    graph_safe: bool = False
    cost: Callable[[Context], float | None] | None = None
    tile: Mapping[str, int] = field(default_factory=dict)
    settings: Callable[[Context], tuple[Setting, ...]] | None = None
    rounds: str = ""
    copies: Callable[[Context], int] | None = None
    by_table: bool = False
    priority: int = 0
    library: str = ""

    @property
    def id(self) -> str:
        return f"{self.op}/{self.name}"

    def resolve(self) -> Callable[..., object]:
        """Import and return the function. Called once, at start."""
        return resolve_attribute(self.load)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way to hold data that several ops share: packed weights, or cache pages.

    `role`: ``weight``, ``experts``, ``kv`` or ``index``. `pack`: ``module:function`` that makes it
    from what the checkpoint holds (weights only). `schemes`: storage schemes it accepts, None for
    any. `nbytes`, for the ledger: bytes of a source tensor by scheme, N and K, scales included
    (None: N K numbers of the activation type).
    `embed_apart`: rows cannot be read from what a product reads, so a token embedding is packed
    apart from an output head that is tied to it.
    """

    id: str
    role: str
    pack: str = ""
    schemes: frozenset[str] | None = None
    conditions: tuple[Condition, ...] = ()
    nbytes: Callable[[str, int, int], int] | None = None
    embed_apart: bool = False

    def storage(self, tensors: tuple[str, ...], site: str) -> tuple[object, ...]:
        """Key of the matrix that `site` reads; uses of `tensors` with equal keys share one."""
        return (tensors, self.embed_apart and site == "embed")

    def resolve(self) -> Callable[..., object]:
        return resolve_attribute(self.pack)


def resolve_attribute(reference: str) -> Callable[..., object]:
    """Import ``module:attribute``."""
    module, _, attribute = reference.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert callable(found)
    return found  # type: ignore[no-any-return]
