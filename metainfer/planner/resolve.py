"""Intent to plan: the one place where values are decided, each with its author and its reason.

Pure: facts, checkpoint index and records in, a frozen plan out. No device, no weights, no torch;
the same function serves `plan`, `doctor` and `serve`, so that what is shown is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import GOALS, Intent
from metainfer.core.ledger import DecisionLedger, Loser, Origin
from metainfer.core.plan import (
    DraftPlan,
    GroupPlan,
    LayoutPlan,
    LedgerRow,
    Limits,
    ModelPlan,
    OpPlan,
    Plan,
)
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason
from metainfer.kernels.impl import Layout, OpRequest
from metainfer.kernels.registry import Registry
from metainfer.kernels.select import Policy, Selection, select
from metainfer.kv.book.capacity import CacheSizes
from metainfer.kv.book.spec import GroupSpec, form_groups
from metainfer.models.arch import Arch
from metainfer.planner import drafts
from metainfer.planner.fitting import DOES_NOT_FIT, first_that_fits
from metainfer.planner.graphs import decode_graphs
from metainfer.planner.memory import (
    DTYPE_BYTES,
    RESERVE_PART,
    CacheBudget,
    kv_rows,
    size_cache,
    total,
    weight_rows,
)
from metainfer.platform.facts import CPU, Facts

PHASES = (Phase.CHUNK, Phase.MIXED, Phase.DECODE)
SINGLE = "single"
NOT_BUILT = "layouts of several ranks are not built yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the resolver may know of a model: its arch, how each tensor is stored, and the draft
    module that it brings along."""

    reference: str
    arch: Arch
    scheme_of: Callable[[str], str]
    parameters: int
    draft: drafts.DraftModule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The plan and what it was made from, for the executor, the scheduler and `doctor`."""

    plan: Plan
    arch: Arch
    selection: Selection
    groups: tuple[GroupSpec, ...]
    sizes: CacheSizes


@dataclass(frozen=True, slots=True)
class _Held:
    """What one bundle holds in memory."""

    weights: list[LedgerRow]
    groups: tuple[GroupSpec, ...]
    cache: CacheBudget
    transient: LedgerRow


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Seeds by device kind; replaced by records once a machine has been tuned."""

    dtype: str
    running: int
    step_tokens: int
    mixed_prefill_tokens: int
    page_tokens: int


_DEFAULTS = {CPU: _Defaults("float32", 32, 1024, 128, 32)}
_ACCELERATOR = _Defaults("bfloat16", 64, 4096, 512, 64)


class _Resolver:
    """One resolution in progress; each method decides one thing and writes it down."""

    def __init__(self, intent: Intent, model: ModelFacts, facts: Facts) -> None:
        self.intent = intent
        self.model = model
        self.arch = model.arch
        self.facts = facts
        self.ledger = DecisionLedger()
        self.seeds = _DEFAULTS.get(facts.device.kind, _ACCELERATOR)

    def given(self, name: str, key: str, default: object, why: str, origin: Origin) -> object:
        """The user's value if there is one, else ours; either way on the record."""
        value = getattr(self.intent, name)
        if value is not None:
            self.ledger.record(key, value, self.intent.origin(name), "asked for")
            return value
        self.ledger.record(key, default, origin, why)
        return default

    def number(self, name: str, key: str, default: int, why: str, origin: Origin) -> int:
        """`given` for a positive count."""
        value = self.given(name, key, default, why, origin)
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1.", code="bad_usage")
        return value

    def dtype(self) -> str:
        seed = self.seeds.dtype
        dtype = str(
            self.given("dtype", "model.dtype", seed, "the device's usual type", Origin.SEED)
        )
        if dtype not in DTYPE_BYTES:
            raise UsageError(f"dtype {dtype!r} is not known.", f"Known: {', '.join(DTYPE_BYTES)}.")
        return dtype

    def limits(self) -> Limits:
        most = self.arch.max_context
        context = self.number(
            "context", "limits.max_context", most, "the model's own limit", Origin.CHECKPOINT
        )
        if context > most:
            raise RefusedError(
                f"a context of {context:,} tokens exceeds the model's {most:,}.",
                f"Use --context {most:,} or less.",
                code="context_too_long",
            )
        running = self.number(
            "concurrency",
            "limits.max_running",
            self.seeds.running,
            "seed for this kind of device",
            Origin.SEED,
        )
        step = self.number(
            "chunk_tokens",
            "limits.step_tokens",
            max(self.seeds.step_tokens, running),
            "seed for this kind of device",
            Origin.SEED,
        )
        if step < running:
            raise UsageError(
                f"a step of {step} tokens cannot decode {running} sequences.",
                f"Raise --chunk-tokens to {running}, or lower --concurrency.",
            )
        mixed = min(self.seeds.mixed_prefill_tokens, step)
        self.ledger.record(
            "limits.mixed_prefill_tokens",
            mixed,
            Origin.SEED if mixed < step else Origin.DERIVED,
            "bounds how long a prompt can hold up running answers",
        )
        self.ledger.record(
            "limits.max_waiting", 4096, Origin.DEFAULT, "further requests get 503 and retry"
        )
        return Limits(
            max_context=context,
            max_running=running,
            step_tokens=step,
            mixed_prefill_tokens=mixed,
            max_waiting=4096,
        )

    def page_tokens(self) -> int:
        """Decided before kernels are, since they have conditions on it.

        A page holds whole compressed entries; two of the longest where the seed holds none.
        """
        unit, seed = self.arch.page_unit, self.seeds.page_tokens
        why = "seed, a power of two"
        if seed % unit:
            seed, why = 2 * unit, f"two units of {unit} tokens, in which every ratio closes"
        page = self.number("page_tokens", "kv_groups", seed, why, Origin.SEED)
        if page % unit:
            raise UsageError(
                f"a page of {page} tokens cuts compressed entries of this model.",
                f"Use a multiple of {unit}.",
                code="bad_page",
            )
        return page

    def draft(self, limits: Limits) -> DraftPlan:
        """The drafter; one that comes with the checkpoint is loaded beside the model."""
        plan = drafts.decide(
            self.intent.draft,
            self.model.draft,
            self.ledger,
            self.intent.origin("draft"),
            step_tokens=limits.step_tokens,
            max_context=limits.max_context,
        )
        if plan.method == drafts.MODEL:
            self.arch = self.arch.with_draft()
        return plan

    def requests(
        self, dtype: str, limits: Limits, page_tokens: int, draft: DraftPlan
    ) -> tuple[OpRequest, ...]:
        schemes = self.schemes()
        decoding = 1 if self.intent.goal == "latency" else min(8, limits.max_running)
        typical = {  # phase -> (tokens, rows that need logits)
            Phase.CHUNK: (limits.step_tokens, 1),
            Phase.MIXED: (limits.mixed_prefill_tokens + decoding, decoding),
            Phase.DECODE: (decoding, decoding),
            Phase.VERIFY: (decoding * (1 + draft.depth),) * 2,
            Phase.DRAFT: (decoding, decoding),
        }
        return tuple(
            request
            for phase in phases(draft)
            for request in self.arch.op_requests(
                phase, *typical[phase], dtype, schemes, page_tokens
            )
        )

    def schemes(self) -> Mapping[str, tuple[str, ...]]:
        found: dict[str, dict[str, None]] = {}
        for spec in self.arch.packed_weights():
            for name in spec.tensors:
                found.setdefault(spec.site, {})[self.model.scheme_of(name)] = None
        return {site: tuple(names) for site, names in found.items()}

    def record_selection(self, selection: Selection) -> None:
        losers = tuple(Loser(refused.name, refused.reasons) for refused in selection.refused)
        pinned = bool(self.intent.layouts)
        predicted = selection.bundle.seconds is not None
        least, first = "with the least predicted time", "declared first: no cost is known"
        self.ledger.record(
            "bundle",
            selection.bundle.name,
            Origin.FLAG if pinned else Origin.COST_MODEL if predicted else Origin.DEFAULT,
            f"the feasible set of shared layouts {least if predicted else first}",
            losers,
        )
        for choice in selection.bundle.choices:
            request = choice.request
            pin = request.site in self.intent.ops or request.op in self.intent.ops
            measured = "record" in choice.why
            ranked = Origin.DEFAULT if choice.seconds is None else Origin.COST_MODEL
            origin = Origin.FLAG if pin else Origin.RECORD if measured else ranked
            self.ledger.record(
                f"ops.{request.site}@{request.phase.value}",
                choice.impl.id,
                origin,
                choice.why,
                tuple(Loser(loser.impl, loser.reasons) for loser in choice.rejected),
            )

    def hold(
        self,
        dtype: str,
        limits: Limits,
        layouts: Mapping[str, Layout],
        page_tokens: int,
        draft: DraftPlan,
    ) -> _Held:
        """Weights, caches and transients in one bundle's layouts.

        Raises:
            RefusedError: they do not fit.
        """
        weights = weight_rows(self.arch, layouts, self.model.scheme_of, dtype)
        tables = self.arch.table_bytes(limits.max_context)
        weights.append(LedgerRow(item="rotary tables", kind="weights", bytes=tables))
        names = {role: layout.id for role, layout in layouts.items()}
        specs = self.arch.cache_specs(dtype, names)
        groups = form_groups(specs, page_tokens=page_tokens)
        drafts.check_rewind(draft, groups)
        scored = min(limits.step_tokens, limits.max_running * (1 + draft.depth))
        transient = LedgerRow(
            item=f"activations of {limits.step_tokens} tokens",
            kind="transient",
            bytes=self.arch.activation_bytes(limits.step_tokens, scored, DTYPE_BYTES[dtype]),
        )
        budget = self.kv_bytes(total([*weights, transient]))
        sized = size_cache(
            groups,
            budget,
            context=limits.max_context,
            running=limits.max_running,
            step_tokens=limits.step_tokens,
            caching=self.intent.prefix_cache,
        )
        return _Held(weights, groups, sized, transient)

    def record_cache(self, cache: CacheBudget) -> None:
        self.ledger.record(
            "kv_tokens", cache.tokens, Origin.DERIVED, f"limited by {cache.limited_by}"
        )

    def graph_buckets(
        self, selection: Selection, running: int, draft: DraftPlan
    ) -> tuple[int, ...]:
        chosen = decode_graphs(selection, self.facts.device.kind, running, draft)
        origin = Origin.SEED if chosen.buckets else Origin.DERIVED
        self.ledger.record(
            "graph_buckets", chosen.buckets or "none", origin, chosen.why, chosen.losers
        )
        return chosen.buckets

    def threads(self, source: Origin) -> int:
        cores = self.facts.host.usable_cores
        if cores is None:
            why = "the number of usable cores is unknown"
            return self.number("threads", "threads", 1, why, Origin.DEFAULT)
        return self.number("threads", "threads", cores, "every usable core", source)

    def record_layouts(self) -> None:
        """One device, whatever the machine has: the others are listed with what they wait for."""
        devices = len(self.facts.devices)
        why = "one device: every phase runs on it"
        if devices > 1:
            why = f"1 of {devices} devices is used: {NOT_BUILT}"
        reason = Reason("not-built", NOT_BUILT, {"devices": devices})
        degrees = [n for n in range(2, devices + 1) if devices % n == 0]
        names = [f"{kind}{n}" for n in degrees for kind in ("tp", "dp")]
        losers = tuple(Loser(name, (reason,)) for name in names)
        self.ledger.record("layouts", SINGLE, Origin.DERIVED, why, losers)
        for key in ("phase_layout", "kv_domains"):
            self.ledger.record(key, SINGLE, Origin.DERIVED, why)

    def kv_bytes(self, held: int) -> int:
        """Device bytes that the cache may take."""
        memory = self.facts.device.memory_bytes
        if self.facts.device.kind == CPU:
            memory = self.facts.host.memory_bytes
        if self.intent.kv_bytes is not None:
            free = None if memory is None else memory - held
            if free is not None and self.intent.kv_bytes > free:
                raise RefusedError(
                    f"--kv-memory asks for {self.intent.kv_bytes:,} B, "
                    f"{max(free, 0):,} B are free beside weights and activations.",
                    f"Ask for at most {max(free, 0):,} B.",
                    code="does_not_fit",
                )
            return self.intent.kv_bytes
        if memory is None:
            raise RefusedError(
                "the device's memory size is unknown, so the cache cannot be sized.",
                "Say it: --kv-memory 4GiB.",
                code="unknown_memory",
            )
        on_cpu = self.facts.device.kind == CPU
        usable = memory if on_cpu else int(memory * (1 - RESERVE_PART))
        if held >= usable:
            message = f"weights and activations need {held:,} B, {usable:,} B are usable"
            raise RefusedError(
                f"{message} on one {self.facts.device.name}.",
                f"Use fewer layers or smaller weights; {NOT_BUILT}.",
                reasons=(Reason("memory", message, {"need": held, "have": usable}),),
                code=DOES_NOT_FIT,
            )
        return min(memory // 8, usable - held) if on_cpu else usable - held


def resolve(
    intent: Intent,
    model: ModelFacts,
    facts: Facts,
    registry: Registry,
    policy: Policy,
    machine: str = "",
    source: Origin = Origin.PROBE,
) -> Resolved:
    """Decide everything.

    Args:
        machine: fingerprint id, or name, of the machine that `facts` describe.
        source: where the facts come from: read off this machine, or a machine file.

    Raises:
        UsageError: a malformed wish.
        RefusedError: it cannot be done here; every reason is listed.
    """
    if intent.goal not in GOALS:
        raise UsageError(f"goal {intent.goal!r} is not known.", f"Goals: {', '.join(GOALS)}.")
    resolver = _Resolver(intent, model, facts)
    ledger, dtype, limits = resolver.ledger, resolver.dtype(), resolver.limits()
    page, draft = resolver.page_tokens(), resolver.draft(limits)
    arch = resolver.arch
    selection = select(registry, resolver.requests(dtype, limits, page, draft), facts, policy)

    def hold(layouts: Mapping[str, str]) -> _Held:
        packed = {role: registry.layout(layout) for role, layout in layouts.items()}
        return resolver.hold(dtype, limits, packed, page, draft)

    selection, held = first_that_fits(selection, hold)
    resolver.record_selection(selection)
    resolver.record_cache(held.cache)
    layouts, weights, groups = selection.bundle.layouts, held.weights, held.groups
    sized, transient = held.cache, held.transient
    threads = resolver.threads(source)
    ledger.record(
        "prefix_cache", intent.prefix_cache, intent.origin("prefix_cache"), "reuse of prefixes"
    )
    ledger.record("model", model.reference, intent.origin("model"), "asked for")
    given = intent.origin("platform") if source is Origin.PROBE else source
    ledger.record("platform", facts.platform, given, "see doctor")
    ledger.record("device", facts.device.name, source, "the platform's device")
    what = "fingerprint of devices and software" if source is Origin.PROBE else "the machine file"
    ledger.record("machine", machine, source, what)
    resolver.record_layouts()
    plan = Plan(
        model=ModelPlan(
            reference=model.reference,
            family=arch.family,
            dtype=dtype,
            parameters=model.parameters,
            vocab_size=arch.vocab_size,
            layers=arch.layers,
        ),
        platform=facts.platform,
        device=facts.device.name,
        machine=machine,
        threads=threads,
        layouts=(LayoutPlan(name=SINGLE),),
        phase_layout={phase.value: SINGLE for phase in phases(draft)},
        kv_domains=1,
        kv_groups=tuple(_group_plan(group, sized.sizes) for group in groups),
        kv_tokens=sized.tokens,
        prefix_cache=intent.prefix_cache,
        bundle=dict(layouts),
        ops={
            f"{c.request.site}@{c.request.phase.value}": OpPlan(
                impl=c.impl.id, quality=c.quality.value, evidence=c.evidence.value
            )
            for c in selection.bundle.choices
        },
        graph_buckets=resolver.graph_buckets(selection, limits.max_running, draft),
        limits=limits,
        draft=draft,
        ledger=(*weights, *kv_rows(sized.sizes, sized.tokens), transient),
        decisions=ledger.freeze(),
    )
    plan.check_origins()
    return Resolved(plan=plan, arch=arch, selection=selection, groups=groups, sizes=sized.sizes)


def choose(
    intent: Intent, model: ModelFacts, facts: Facts, registry: Registry, policy: Policy
) -> Selection:
    """The kernels alone, for a machine that cannot hold the rest. Raises as `resolve`."""
    resolver = _Resolver(intent, model, facts)
    dtype, limits, page = resolver.dtype(), resolver.limits(), resolver.page_tokens()
    asked = resolver.requests(dtype, limits, page, resolver.draft(limits))
    return select(registry, asked, facts, policy)


def phases(draft: DraftPlan) -> tuple[Phase, ...]:
    """The phases that an engine meets; kernels are chosen for each."""
    if not draft.depth:
        return PHASES
    return (*PHASES, Phase.VERIFY, *((Phase.DRAFT,) if draft.method == drafts.MODEL else ()))


def _group_plan(group: GroupSpec, sizes: CacheSizes) -> GroupPlan:
    return GroupPlan(
        name=group.name,
        kind=group.kind.value,
        layout=group.form.layout,
        pages=sizes.pages[group.index],
        page_tokens=group.page_tokens,
        page_bytes=group.page_bytes,
        slots=sizes.slots + 1 if group.slot_bytes else 0,
        slot_bytes=group.slot_bytes,
        snapshots=sizes.places(group.index),
        snapshot_bytes=group.snapshot_bytes if group.slot_bytes else 0,
    )
