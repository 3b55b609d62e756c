"""A rank's process: it resolves the same plan, loads its part, and runs what it is told.

Target of `workers.ranks.ProcessGroup`. What it decides for itself follows from shared inputs; the
engine's plan travels along as values, and a difference stops the start with both of them (B-17).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from metainfer.comm.agree import DisagreementError, differences
from metainfer.comm.host_ranks import HostRanks
from metainfer.comm.peers import Place
from metainfer.comm.plan import AUTO
from metainfer.comm.plan_file import Tiers, parse
from metainfer.comm.request import ELEMENT_BYTES
from metainfer.comm.rooms import longest_bytes
from metainfer.comm.side import Turns
from metainfer.comm.topology import from_facts, one_switch
from metainfer.core.digest import to_plain
from metainfer.core.env import cache_dir
from metainfer.core.intent import Intent
from metainfer.engine.grammars import open_library
from metainfer.engine.machine import open_machine
from metainfer.executor.assemble import assemble
from metainfer.executor.loading import tensor_source
from metainfer.executor.ranks import RankAnswer, RankSide
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved
from metainfer.platform.facts import Facts
from metainfer.workers.wire import RankFacts

if TYPE_CHECKING:
    from metainfer.comm.card_ranks import CardRanks


def facts_of(intent: Intent, resolved: Resolved, tiers: str = "") -> dict[str, Any]:
    """What every rank is told: the wish, the values that came of it, and the text of the file of
    measured tiers, which one process reads for all."""
    plan = to_plain(resolved.plan.values())
    return {"intent": msgspec.to_builtins(intent), "plan": plan, "tiers": tiers}


def tiers_path(fingerprint: str) -> Path:
    """Where the tiers of a machine lie (`comm.plan_file`)."""
    return cache_dir() / "comm" / f"{fingerprint}.toml"


class Rank:
    """One rank of a layout: on the host's CPU, or on the card of its number. Methods are called by
    `executor.ranks`."""

    def __init__(self, facts: RankFacts) -> None:
        intent = msgspec.convert(facts.facts["intent"], Intent)
        self._model = open_model(intent.model, adapters=intent.adapters)
        machine = open_machine(intent.platform)
        device = own_device(machine.torch_device(), facts.rank, intent)
        machine.recall(machine.resolve(self._model, intent).plan.model.dtype)
        resolved = machine.resolve_proven(self._model, intent, lambda case: None)
        _same_plan(facts, resolved)
        self._vocab = resolved.arch.vocab_size
        self._grammar = resolved.plan.grammar
        layout, slots = resolved.plan.layouts[0], resolved.sizes.slots
        place = Place(layout, facts.rank)
        text = str(facts.facts["tiers"])
        kept, _ = parse(text, "tiers", machine.fingerprint)
        tiers = kept.tiers if text else {}
        self._links = links_of(
            facts.token, place, device, intent, machine.facts, resolved, tiers=tiers
        )
        executor = assemble(
            resolved,
            tensor_source(self._model, device),
            machine.registry,
            device,
            place=place,
            ranks=self._links.ranks,
        )
        leads, level = facts.rank % layout.tensor == 0, place.shares_tokens
        self._side = RankSide(
            executor,
            place.domain,
            slots,
            leads=leads,
            level=level,
            shared=layout.prefill > 1,
        )

    def use_grammars(self) -> None:
        library, _ = open_library(
            self._grammar, self._model.source.reference, self._vocab, self._model.eos_token_ids
        )
        if library is not None:
            self._side.executor.use_grammars(library.open)

    def warm(self) -> list[str]:
        """Returns what a start has to say of its collectives."""
        self._side.executor.warm()
        self._links.settle()
        return sorted(
            f"long sums are enqueued by the interpreter, about half as fast: {reason}"
            for group in self._links.describe().values()
            for reason in group.get("interpreted", ())
        )

    def submit(self, plan: bytes) -> None:
        self._side.submit(plan)

    def collect(self) -> RankAnswer:
        answer = self._side.collect()
        self._links.check()
        return answer

    def collectives(self) -> dict[str, Any]:
        """By group: plans with what lost, and the share of calls by path."""
        return self._links.describe()

    def held_bytes(self) -> dict[str, int]:
        return self._side.executor.held_bytes

    def moved_bytes(self) -> dict[str, int]:
        return self._side.executor.moved_bytes

    def abort(self, cause: str) -> None:
        self._links.abort(cause)

    def close(self) -> None:
        self._side.executor.close()
        self._links.close()


def own_device(device: torch.device, rank: int, intent: Intent) -> torch.device:
    """The card of a rank, current from here on; a device that is no card is everyone's."""
    if device.type != "cuda":
        return device
    own = torch.device("cuda", 0 if intent.one_card else rank)
    torch.cuda.set_device(own)
    return own


def links_of(
    token: str,
    place: Place,
    device: torch.device,
    intent: Intent,
    facts: Facts,
    resolved: Resolved,
    *,
    tiers: Tiers | None = None,
) -> HostRanks | CardRanks:
    """How this rank meets the others."""
    if device.type != "cuda":
        return HostRanks(token, place, tiers)
    from metainfer.comm.card_ranks import CardRanks
    from metainfer.comm.card_side import CardSide

    layout, plan = place.layout, resolved.plan
    beside = plan.halves or plan.sum_pieces or plan.gathers_beside
    tree = one_switch(layout.ranks) if intent.one_card else from_facts(facts)
    costs = resolved.arch.costs()
    hidden = costs.hidden if costs is not None else 0  # unknown: copy engines get little room
    row_bytes = hidden * ELEMENT_BYTES[plan.model.dtype]
    return CardRanks(
        token,
        place,
        tree,
        device,
        dtype=plan.model.dtype,
        most_bytes=longest_bytes(layout, plan.limits.step_tokens, row_bytes),
        method=intent.collectives or AUTO,
        tiers=tiers,
        sharing=intent.one_card,
        turns=Turns(CardSide(device)) if beside else None,
    )


def _same_plan(facts: RankFacts, resolved: Resolved) -> None:
    """As `comm.agree.agree`, before there is anything to exchange over."""
    theirs, mine = dict(facts.facts["plan"]), to_plain(resolved.plan.values())
    assert isinstance(mine, dict)
    if mine != theirs:
        lines = differences([theirs, mine])
        raise DisagreementError(
            f"rank {facts.rank} resolved another plan than the engine: {'; '.join(lines)}.",
            "Let nothing else change records, environment or files while the engine starts.",
        )
