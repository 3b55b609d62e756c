"""The frozen plan: everything decided before weights load.

`Plan.values()` flattens it to dotted paths, and every path has a `Decision` (who set it, why, what
lost): `check_origins` refuses a plan in which a value has no author. Its digest is the plan's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace

from metainfer.core.digest import digest, to_plain
from metainfer.core.errors import InternalError
from metainfer.core.ledger import Decision
from metainfer.core.step import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """Which model, in which arithmetic; `options`: switches of its family that were set."""

    reference: str
    family: str
    dtype: str
    parameters: int
    vocab_size: int
    layers: int
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """How work is spread over ranks. One rank: all degrees 1.

    `context`: ranks that share a request's pages, each with whole weights. `prefill`: ranks that
    share the rows of a prompt's chunk, each with whole weights of attention; where it is 1, chunks
    are computed as decodes are. Decodes never follow it. `shards`: ranks of a tensor group that
    each hold a part of the cache, which all of them would copy otherwise.
    """

    name: str
    tensor: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1
    prefill: int = 1
    shards: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.data * self.context

    @property
    def splits_phases(self) -> bool:
        """Whether chunks are computed another way than decodes, so that no segment mixes them."""
        return self.prefill > 1 or self.shards > 1

    @property
    def decoding(self) -> LayoutPlan:
        """The part of a pair that decodes follow; a layout that is no pair is its own."""
        return replace(self, prefill=1)

    def phase_name(self, phase: Phase) -> str:
        """What a segment calls it: the part of a pair's name before or behind the stroke."""
        first, _, second = self.name.partition("/")
        return first if phase is Phase.CHUNK or not second else second


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One KV group as the executor allocates it. Bytes are per domain; `slots` counts the line that
    belongs to padding."""

    name: str
    kind: str
    layout: str
    pages: int
    page_tokens: int
    page_bytes: int
    slots: int = 0
    slot_bytes: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0

    @property
    def allocated_bytes(self) -> int:
        held = self.slots * self.slot_bytes + self.snapshots * self.snapshot_bytes
        return self.pages * self.page_bytes + held


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the scheduler may do. `mixed_prefill_tokens`: most prefill rows in a step that also
    decodes, so that long prompts cannot freeze running answers."""

    max_context: int
    max_running: int
    step_tokens: int
    mixed_prefill_tokens: int
    max_waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """Who proposes tokens ahead (``off``, ``ngram``, ``mtp``), and how many at most. The width of
    verify runs, the proposals of a drafter and the rows that logits take follow from `depth`.
    `adaptive`: while serving, how many is chosen by measured gain, none included."""

    method: str = "off"
    depth: int = 0
    adaptive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """A step that is captured: a phase's segments of at most so many tokens and runs, padded."""

    phase: str
    tokens: int
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """A LoRA adapter beside the weights. `digest`: of its content; `rank`: the largest of its."""

    name: str
    digest: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlan:
    """The implementation at one site in one phase. `setting`: how a record says to launch it;
    `tuned`: what that record is of, empty where nothing was tuned."""

    impl: str
    quality: str
    evidence: str
    setting: Mapping[str, object] = field(default_factory=dict)
    tuned: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One engine, decided. `phase_layout`: phase class -> layout name. `ops`: ``site@phase``.
    `graph_buckets`: token counts at which decode is captured; empty: it runs op by op. `graphs`:
    all captured steps, in the order of capture. `overlap`: a captured step may be launched before
    the one ahead of it was read. `halves`: chunks of at least so many tokens are computed as two
    halves in turns; `sum_pieces`: others of at least so many sum products piece by piece;
    `gathers_beside`: those of at least so many whose rows ranks share gather beside computing;
    `shared_beside`: in steps of at most so many, the shared expert beside the routed ones; 0: none.
    `rounded_from`: from so many rows on, ranks round what they send to experts that they share; 0:
    never. `prefill_from`: of a pair of layouts, steps of fewer prompt tokens are computed as
    decodes are, beside these; 0: none. `adapters`: in the order of their places. `emulated`: which
    rank of how many of which machine this is, where its peers are a stand-in; such a plan answers
    nothing."""

    model: ModelPlan
    platform: str
    device: str
    machine: str  # fingerprint id
    threads: int
    layouts: tuple[LayoutPlan, ...]
    phase_layout: Mapping[str, str]
    kv_domains: int
    kv_groups: tuple[GroupPlan, ...]
    kv_tokens: int
    prefix_cache: bool
    grammar: str  # the library behind structured output and enforced calls, or ``none``
    bundle: Mapping[str, str]
    ops: Mapping[str, OpPlan]
    graph_buckets: tuple[int, ...]
    graphs: tuple[StepGraph, ...]
    overlap: bool
    halves: int
    sum_pieces: int
    gathers_beside: int
    shared_beside: int
    rounded_from: int
    prefill_from: int
    limits: Limits
    draft: DraftPlan
    ledger: tuple[LedgerRow, ...]
    decisions: tuple[Decision, ...]
    adapters: tuple[AdapterPlan, ...] = ()
    emulated: Mapping[str, object] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Changes iff some decided value changes; reasons do not count."""
        return digest(self.values())

    def values(self) -> dict[str, object]:
        """Every decided value by dotted path. The memory ledger is derived and left out."""
        found: dict[str, object] = {}
        for item in fields(self):
            if item.name not in ("decisions", "ledger"):
                found.update(_flatten(item.name, getattr(self, item.name)))
        return found

    def check_origins(self) -> None:
        """Every value has an author: a decision for its path or for a parent of its path.

        Raises:
            InternalError: naming each value without one.
        """
        keys = {decision.key for decision in self.decisions}
        orphans = [path for path in self.values() if not _covered(path, keys)]
        if orphans:
            raise InternalError(f"plan values without a decision: {', '.join(orphans)}")

    def to_json(self) -> dict[str, object]:
        body: dict[str, object] = {
            item.name: to_plain(getattr(self, item.name))
            for item in fields(self)
            if item.name not in ("decisions", "ledger")
        }
        body["fingerprint"] = self.fingerprint
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One line of the memory ledger. `kind`: weights, kv, transient, reserve ...; `memory`: which
    memory (device, host, pinned, numa0, disk). `logical_bytes`: what the content needs, where it
    differs from what is allocated. `share`: how ranks share a weight (``whole``, ``rows/8``)."""

    item: str
    kind: str
    bytes: int
    memory: str = "device"
    logical_bytes: int | None = None
    share: str = ""


def _flatten(path: str, value: object) -> Iterator[tuple[str, object]]:
    if is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _flatten(f"{path}.{item.name}", getattr(value, item.name))
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _flatten(f"{path}.{key}", value[key])
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _flatten(f"{path}.{getattr(item, 'name', index)}", item)
    else:
        yield path, value


def _covered(path: str, keys: set[str]) -> bool:
    return path in keys or any(path.startswith(f"{key}.") for key in keys)
