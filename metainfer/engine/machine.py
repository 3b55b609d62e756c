"""The machine under a plan: facts, candidates, and what is known to work here. No torch at import.

A kernel that has never run on this machine goes through its op's cases before it may serve (law 4);
the outcome is a record of the machine's fingerprint, so the second start asks nothing again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from metainfer.core.env import cache_dir
from metainfer.core.errors import UserError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Loser, Origin
from metainfer.core.records import Record, RecordStore
from metainfer.engine.proving import CHILD, NOT_BEGUN, PASSED, TIME_LIMIT_S, Tried, try_apart
from metainfer.kernels import tuning
from metainfer.kernels.choice import Policy
from metainfer.kernels.evidence import Qualification, evidence_for
from metainfer.kernels.impl import Evidence, Impl, Layout, OpRequest
from metainfer.kernels.registry import Registry
from metainfer.kernels.tuning import Tuned, Tunings
from metainfer.ops.catalog import builtin_registry
from metainfer.planner import calibration, needs
from metainfer.planner.calibration import Calibration
from metainfer.planner.emulation import emulation_of
from metainfer.planner.needs import Needs
from metainfer.planner.opening import OpenedModel
from metainfer.planner.resolve import Resolved, resolve
from metainfer.platform.base import Platform
from metainfer.platform.discovery import AUTO, select_platform
from metainfer.platform.facts import CPU, Facts
from metainfer.platform.fingerprint import fingerprint
from metainfer.platform.host_speed import host_speed, with_host_speed
from metainfer.platform.known_cards import with_card_rates

if TYPE_CHECKING:
    import torch

QUALIFICATION = "qualification"
OPS = "metainfer.ops"
MOST_LANES = 16
"""Child processes that prove kernels at once: each holds a context of about half a gigabyte."""


@dataclass(slots=True, kw_only=True)
class Machine:
    """One machine on one platform. `qualified` grows as kernels prove themselves."""

    platform: Platform
    origin: Origin
    losers: tuple[Loser, ...]
    facts: Facts
    registry: Registry
    store: RecordStore
    fingerprint: str
    qualified: dict[str, Qualification] = field(default_factory=dict)
    _tunings: Tunings | None = None

    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.platform.torch_device())

    def resolve(self, model: OpenedModel, intent: Intent) -> Resolved:
        """The plan of `model` here, by what is known so far.

        A kernel that was not tried yet may be chosen, and shows it (evidence ``none`` or weaker
        than ``ran on this card``): it cannot serve before `resolve_proven` has tried it.

        Raises:
            UsageError, RefusedError: as `planner.resolve.resolve`.
        """
        policy = Policy(
            pins=intent.ops,
            layout_pins=intent.layouts,
            evidence=evidence_for(self.facts, tuple(self.qualified.values())),
            allow_fallback=frozenset(intent.allow_fallback),
            min_evidence=Evidence.NONE,
            disproven={q.impl: q.reasons for q in self.qualified.values() if not q.passed},
            tuned=self.tuned,
        )
        return resolve(
            intent,
            model.facts,
            self.facts,
            self.registry,
            policy,
            self.fingerprint,
            measured=self.step_times,
            needs=self.step_needs,
            emulation=emulation_of(intent),
        )

    def tuned(self, impl: Impl, request: OpRequest) -> Tuned | None:
        """How `impl` is launched for `request`, by records of this class of cards or a near one."""
        if self._tunings is None:
            card = tuning.card_class(self.facts)
            sources = {
                each.id: source_digest(each) for each in self.registry.impls() if each.settings
            }
            self._tunings = tuning.read(self.store.of(card), card, sources)
        return self._tunings.find(impl, request, self.facts.device.units)

    def forget_tunings(self) -> None:
        """Records were written: read them again."""
        self._tunings = None

    def step_times(self, key: str) -> Calibration | None:
        """This machine's record of measured steps (`planner.calibration`), if there is one."""
        record = self.store.get(calibration.KIND, key)
        return None if record is None else calibration.calibration_from(record.payload)

    def step_needs(self, key: str) -> Needs | None:
        """This machine's record of what steps need (`planner.needs`), if there is one."""
        record = self.store.get(needs.KIND, key)
        return None if record is None else needs.needs_from(record.payload)

    def resolve_proven(
        self, model: OpenedModel, intent: Intent, on_case: Callable[[str], None]
    ) -> Resolved:
        """As `resolve`, but every chosen kernel has passed its op's cases on this machine.

        Raises:
            UsageError, RefusedError: as `resolve`; a pinned kernel that fails its cases too.
        """
        while True:
            resolved = self.resolve(model, intent)
            chosen = {c.impl.id: c.impl for c in resolved.selection.bundle.choices}
            untried = [impl for impl in chosen.values() if impl.id not in self.qualified]
            if not untried:
                return resolved
            dtype, lanes = resolved.plan.model.dtype, self._lanes(len(untried))
            if lanes == 1 and not any(impl.library for impl in untried):
                self.prove(untried, dtype, on_case)
                continue
            for tried in self.prove_apart(untried, dtype, lanes=lanes):
                on_case(tried.impl)

    def prove(
        self,
        impls: Iterable[Impl],
        dtype: str,
        on_case: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Run the cases of each on this device and keep the outcome."""
        from metainfer.ops.qualify import qualify_all

        for impl in impls:
            on_case(impl.id)
            (found,) = qualify_all([impl], dtype, self.torch_device(), self.facts, self.registry)
            self.keep(impl, dtype, found)

    def prove_apart(
        self,
        impls: Sequence[Impl],
        dtype: str,
        *,
        lanes: int = 1,
        time_limit_s: float = TIME_LIMIT_S,
        child: str = CHILD,
    ) -> Iterator[Tried]:
        """As `prove`, in `lanes` child processes at once (`proving.try_apart`): one that dies or
        hangs is an outcome too.

        What did not pass beside others is tried once more alone: memory and cores are short there.
        A child that never began says nothing about the kernel, and is no record.
        """
        listed = {impl.id: impl for impl in impls}
        share = partial(
            try_apart, platform=self.platform.name, dtype=dtype, time_limit_s=time_limit_s,
            child=child,
        )  # fmt: skip
        again = []
        for tried in share(list(listed), lanes=lanes):
            if lanes > 1 and tried.outcome != PASSED:
                again.append(tried.impl)
                continue
            self._take(listed[tried.impl], dtype, tried)
            yield tried
        for tried in share(again):
            self._take(listed[tried.impl], dtype, tried)
            yield tried

    def _take(self, impl: Impl, dtype: str, tried: Tried) -> None:
        if tried.reasons == (NOT_BEGUN,):
            self.qualified[impl.id] = tried.qualification
        else:
            self.keep(impl, dtype, tried.qualification)

    def _lanes(self, kernels: int) -> int:
        """Child processes for so many kernels. A host's kernels use its cores themselves, and one
        that is alone is not worth a process."""
        cores = self.facts.host.usable_cores or 1
        return 1 if self.facts.device.kind == CPU else min(kernels, cores, MOST_LANES)

    def keep(self, impl: Impl, dtype: str, found: Qualification) -> None:
        """An outcome counts from now on, and is a record."""
        self.qualified[impl.id] = found
        payload = {"passed": found.passed, "reasons": list(found.reasons)}
        self.store.put(Record(QUALIFICATION, self._key(impl, dtype), payload, {"seed": 0}))

    def _key(self, impl: Impl, dtype: str) -> str:
        library = f":{self.facts.software.get(impl.library)}" if impl.library else ""
        return f"{impl.id}:{dtype}:{source_digest(impl)}{library}"

    def recall(self, dtype: str) -> None:
        """Take in this machine's records of kernels proven in `dtype` with today's sources."""
        for impl in self.registry.impls():
            record = self.store.get(QUALIFICATION, self._key(impl, dtype))
            if record is not None:
                payload: Any = record.payload
                self.qualified[impl.id] = Qualification(
                    impl.id, bool(payload["passed"]), tuple(payload["reasons"])
                )


def open_machine(platform: str | None = None) -> Machine:
    """Choose the platform, read its facts, collect candidates.

    Raises:
        UserError: the platform was asked for and cannot run, or a plug-in is broken.
    """
    selected = select_platform(None if platform in (None, AUTO) else platform)
    facts = selected.platform.facts()
    found = fingerprint(facts)
    store = RecordStore(cache_dir() / "records", found)
    facts = with_card_rates(with_host_speed(facts, host_speed(facts, store)))
    registry = builtin_registry()
    for declared in (*selected.platform.layouts(), *selected.platform.providers()):
        if isinstance(declared, Layout):
            registry.add_layout(declared)
        elif isinstance(declared, Impl):
            registry.add(declared)
        else:
            raise UserError(
                f"platform {selected.platform.name} declares a {type(declared).__name__}.",
                "Tell its vendor: providers() gives Impl, layouts() gives Layout.",
                code="bad_platform",
            )
    return Machine(
        platform=selected.platform,
        origin=selected.origin,
        losers=selected.losers,
        facts=facts,
        registry=registry,
        store=store,
        fingerprint=found.id,
    )


def source_digest(impl: Impl) -> str:
    """Changes with any source of the package that an implementation lives in, and of the kernel
    code that ops share."""
    return _source_digest(impl.load.partition(":")[0].rpartition(".")[0])


@cache
def _source_digest(package: str) -> str:
    found = hashlib.sha256()
    own = list(resources.files(package).iterdir())
    if package.startswith(OPS):
        shared = resources.files(OPS).iterdir()
        own += [item for item in shared if item.name.startswith("triton_")]
    for item in sorted(own, key=lambda entry: entry.name):
        if item.is_file() and not item.name.endswith((".md", ".pyc")):
            found.update(item.name.encode())
            found.update(item.read_bytes())
    return found.hexdigest()[:12]
