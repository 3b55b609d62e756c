"""A rank's process: it resolves the same plan, loads its part, and runs what it is told.

Target of `workers.ranks.ProcessGroup`. What it decides for itself follows from shared inputs; the
engine's plan travels along as values, and a difference stops the start with both of them (B-17).
"""

from __future__ import annotations

from typing import Any

import msgspec

from metainfer.comm.agree import DisagreementError, differences
from metainfer.comm.host_ranks import HostRanks
from metainfer.comm.peers import Place
from metainfer.core.digest import to_plain
from metainfer.core.intent import Intent
from metainfer.engine.grammars import open_library
from metainfer.engine.machine import open_machine
from metainfer.executor.assemble import assemble
from metainfer.executor.loading import tensor_source
from metainfer.executor.ranks import RankSide
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved
from metainfer.workers.wire import RankFacts


def facts_of(intent: Intent, resolved: Resolved) -> dict[str, Any]:
    """What every rank is told: the wish, and the values that came of it."""
    return {"intent": msgspec.to_builtins(intent), "plan": to_plain(resolved.plan.values())}


class Rank:
    """One rank of a layout on the host's CPU. Methods are called by `executor.ranks`."""

    def __init__(self, facts: RankFacts) -> None:
        intent = msgspec.convert(facts.facts["intent"], Intent)
        self._model = open_model(intent.model, adapters=intent.adapters)
        machine = open_machine(intent.platform)
        machine.recall(machine.resolve(self._model, intent).plan.model.dtype)
        resolved = machine.resolve_proven(self._model, intent, lambda case: None)
        _same_plan(facts, resolved)
        self._vocab = resolved.arch.vocab_size
        self._grammar = resolved.plan.grammar
        layout, slots = resolved.plan.layouts[0], resolved.sizes.slots
        place = Place(layout, facts.rank)
        self._links = HostRanks(facts.token, place)
        device = machine.torch_device()
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

    def warm(self) -> None:
        self._side.executor.warm()

    def execute(self, plan: bytes) -> tuple[str, bytes]:
        return self._side.execute(plan)

    def held_bytes(self) -> dict[str, int]:
        return self._side.executor.held_bytes

    def moved_bytes(self) -> dict[str, int]:
        return self._side.executor.moved_bytes

    def abort(self, cause: str) -> None:
        self._links.abort(cause)

    def close(self) -> None:
        self._side.executor.close()
        self._links.close()


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
