"""The executor's memory between steps: one row per slot, kept current by the diffs in step plans.

Everything here lives on the host as numpy arrays, so that building a segment's inputs is a handful
of vectorised look-ups whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from metainfer.core.errors import InternalError
from metainfer.core.request import GrammarSpec, SamplingParams
from metainfer.core.step import NO_ADAPTER, NewRequest, StepPlan
from metainfer.executor.speculative import Grammar
from metainfer.kv.book.spec import GroupSpec

GRAMMAR, HISTORY = "grammar", "history"
"""Why a draw asks for all tokens before it: a grammar has to be told them · they are counted or
compared (penalties, bad words)."""

OpenGrammar = Callable[[GrammarSpec, Sequence[int]], Grammar]
"""A request's grammar, told what was generated before it entered."""


@dataclass(slots=True)
class SlotState:
    """One running request. `tokens` = prompt and everything sampled; `sampled` counts draws over
    the request's whole life, preemptions included; `awaited`: draws under way, which neither has
    yet. `proposals`: what a model that drafts made of the latest run; `grammar` narrows what may be
    drawn; `adapter`: its place, for life. `asks`: why a draw asks for all tokens before it; `bare`:
    it changes no logit but by `min_tokens`, and reports no log-probability."""

    request_id: str
    params: SamplingParams
    prompt_len: int
    tokens: list[int]
    sampled: int
    eos_token_ids: tuple[int, ...]
    vocab: int
    proposals: list[int] = field(default_factory=list)
    grammar: Grammar | None = None
    adapter: int = NO_ADAPTER
    awaited: int = 0
    _counts: bool = field(init=False)
    _edits: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self._counts = params.counts_tokens
        self._edits = bool(self._counts or params.logit_bias or params.allowed_token_ids)

    @property
    def asks(self) -> str:
        if self.grammar is not None:
            return GRAMMAR
        return HISTORY if self._counts else ""

    @property
    def bare(self) -> bool:
        return not self._edits and self.grammar is None and self.params.logprobs is None


class SlotTable:
    """Per-slot page tables (one [slots, W] per group, W = 0 for states) and request states."""

    def __init__(
        self, groups: Sequence[GroupSpec], slots: int, max_context: int, vocab: int
    ) -> None:
        self._vocab = vocab
        self.groups = tuple(groups)
        self.slots = slots
        self.states: dict[int, SlotState] = {}
        self.open_grammar: OpenGrammar | None = None
        self.page_tables: list[npt.NDArray[np.int32]] = [
            np.full((slots, group.pages_for(max_context)), -1, dtype=np.int32) for group in groups
        ]

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan's diff: releases, then entries, then page grants."""
        for slot in plan.released:
            self.states.pop(slot, None)
        for new in plan.new:
            self._enter(new)
        for grant in plan.pages:
            table = self.page_tables[grant.group]
            end = grant.first + len(grant.pages)
            if end > table.shape[1]:
                raise InternalError(
                    f"slot {grant.slot} was granted page {end - 1} of {table.shape[1]}"
                )
            table[grant.slot, grant.first : end] = grant.pages

    def _enter(self, new: NewRequest) -> None:
        if new.slot in self.states:
            raise InternalError(f"slot {new.slot} was given away twice")
        grammar = None
        if new.params.grammar is not None:
            if self.open_grammar is None:
                raise InternalError("a request with a grammar reached an executor without any")
            grammar = self.open_grammar(new.params.grammar, new.prompt[new.prompt_len :])
        self.states[new.slot] = SlotState(
            new.request_id,
            new.params,
            new.prompt_len,
            list(new.prompt),
            new.sample_index,
            new.eos_token_ids,
            self._vocab,
            grammar=grammar,
            adapter=new.adapter,
        )
        for table in self.page_tables:
            table[new.slot] = -1
