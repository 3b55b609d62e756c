"""A device without hardware whose tokens depend on every byte of the cache it is told to read.

The pseudo-model writes, for each token, a number into the page cells of that position; the number
depends on the token, the position and everything read so far. The next token is a hash of all cells
and states that position may read *through the page tables of the plan*. A wrong page, a stale or
reused one, a shared prefix of other content, a state restored from the wrong place: each changes
the tokens. `straight_line` computes the same function on plain lists; equality of both proves the
control plane. `NullDevice(contents=False)` keeps only the clock, for millions of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from metainfer.core.clock import VirtualClock
from metainfer.core.errors import InternalError
from metainfer.core.request import Request
from metainfer.core.step import (
    NO_ADAPTER,
    PENDING,
    NewRequest,
    RankTokens,
    RunResult,
    StateMove,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenRun,
)
from metainfer.kv.book.capacity import CacheSizes
from metainfer.kv.book.spec import GroupKind, GroupSpec, Rewind

_MASK = (1 << 61) - 1
_RING_HISTORY = 4
"""Tokens that a cursor state reads when it is nowhere clean."""


def mix(*values: int) -> int:
    """A 61-bit hash of integers; order matters."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value + 0x632BE59BD9B4E019)) * 0xFF51AFD7ED558CCD & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state & _MASK


def ring_size(group: GroupSpec) -> int:
    """Rows of a cursor state: what it reads, and what rejected drafts may overwrite."""
    return (group.clean_tokens or _RING_HISTORY) + group.ring_tokens


def readable(group: GroupSpec, position: int) -> tuple[int, int]:
    """The half-open range of positions that a token at `position` reads in a group."""
    if group.kind is GroupKind.PAGED:
        return 0, (position + 1) // group.tokens_per_entry * group.tokens_per_entry
    if group.kind is GroupKind.WINDOW:
        return max(0, position - group.window + 1), position + 1
    clean = group.clean_tokens
    begin = position // clean * clean if clean else max(0, position - _RING_HISTORY + 1)
    return begin, position + 1


def next_token(view: int, vocab: int, seed: int | None, index: int) -> int:
    """The token sampled from what was read; a seeded stream also depends on its index."""
    return mix(view, 0 if seed is None else mix(seed, index)) % vocab


def adapted(token: int, adapter: int) -> int:
    """What the pseudo-model computes with: another number for every adapter."""
    return token if adapter == NO_ADAPTER else mix(token, adapter)


def straight_line(
    request: Request,
    groups: tuple[GroupSpec, ...],
    vocab: int,
    max_context: int,
    adapter: int = NO_ADAPTER,
) -> list[int]:
    """The answer of `request` computed alone, on plain lists. Stop ids included in the decision,
    not in the answer. `adapter`: the place of the request's."""
    params = request.params
    tokens = list(request.prompt)
    eos = () if params.ignore_eos else request.eos_token_ids
    stops = eos + params.stop_token_ids
    cells: list[list[int]] = [[] for _ in groups]
    view, limit = 0, min(len(tokens) + params.max_tokens, max_context)
    done, answer = 0, 0
    while answer < params.max_tokens:
        for position in range(done, len(tokens)):
            view = _lone_step(groups, cells, adapted(tokens[position], adapter), position)
        done = len(tokens)
        token = next_token(view, vocab, params.seed, answer)
        if token in stops and answer >= params.min_tokens:
            break
        tokens.append(token)
        answer += 1
        if len(tokens) >= limit:
            break
    return tokens[len(request.prompt) :]


def _lone_step(
    groups: tuple[GroupSpec, ...], cells: list[list[int]], token: int, position: int
) -> int:
    """Compute one position on plain lists. A rolling state keeps its history as its cells."""
    base = mix(token, position, *(_lone_view(g, cells[g.index], position, 0) for g in groups))
    for group in groups:
        column = cells[group.index]
        rolling = group.kind is GroupKind.STATE and group.rewind is Rewind.SNAPSHOT
        before = column[-1] if column and not _cleaned(group, position) else 0
        column.append(mix(before, base) if rolling else mix(base, group.index))
    return mix(base, *(_lone_view(g, cells[g.index], position, 1) for g in groups))


def _cleaned(group: GroupSpec, position: int) -> bool:
    return bool(group.clean_tokens) and position % group.clean_tokens == 0


def _lone_view(group: GroupSpec, column: list[int], position: int, own: int) -> int:
    """What `position` reads, its own cell included iff `own` is 1."""
    if group.kind is GroupKind.STATE and group.rewind is Rewind.SNAPSHOT:
        if own:
            return column[position]
        return 0 if not column or _cleaned(group, position) else column[-1]
    begin, end = readable(group, position)
    end = min(end, position + own)
    if group.kind is GroupKind.STATE:
        return sum(column[begin:end]) & _MASK
    span, total = group.page_tokens, 0
    while begin < end:
        page = begin // span
        stop = min(end, (page + 1) * span)
        total += (page + 1) * sum(column[begin:stop])
        begin = stop
    return total & _MASK


@dataclass(slots=True)
class NullCost:
    """Seconds a step takes: the slowest domain decides."""

    step_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_token_s: float = 0.0

    def of(self, ranks: Sequence[RankTokens]) -> float:
        worst = 0.0
        for rank in ranks:
            prefill = sum(len(run.tokens) for run in rank.runs if not _short(run))
            decode = sum(len(run.tokens) for run in rank.runs if _short(run)) + rank.padding
            worst = max(worst, prefill * self.prefill_token_s + decode * self.decode_token_s)
        return self.step_s + worst


def _short(run: TokenRun) -> bool:
    return len(run.tokens) == 1 or run.drafts > 0


@dataclass(slots=True)
class _Slot:
    """A request on the device. `tables[g]`: page of each entry; `view`: of the latest position."""

    entry: NewRequest
    tables: list[dict[int, int]]
    states: list[list[int]]  # per group: ring rows, or one rolling value
    sampled: int
    latest: int = PENDING
    proposals: list[int] = field(default_factory=list)


class NullProposer(Protocol):
    """A stand-in for a model that drafts (`executor.model_drafts.ModelDrafts`)."""

    def propose(self, request_id: str, sampled: int, count: int) -> Sequence[int]:
        """Exactly `count` ids that may follow the first `sampled` tokens of the answer."""
        ...


class NullDevice:
    """An `Executor`. `faults` maps (step, request id) to an error its run reports, for tests."""

    def __init__(
        self,
        vocab: int = 1000,
        *,
        contents: bool = True,
        cost: NullCost | None = None,
        clock: VirtualClock | None = None,
        proposer: NullProposer | None = None,
    ) -> None:
        self.vocab = vocab
        self.proposer = proposer
        self.contents = contents
        self.cost = cost or NullCost()
        self.clock = clock
        self.faults: dict[tuple[int, str], str] = {}  # (step, request id) -> message
        self._open: deque[StepResult] = deque()
        self._slots: dict[int, _Slot] = {}

    # -- Executor ----------------------------------------------------------------------------------

    def start(self, sizes: CacheSizes) -> None:
        self._sizes = sizes
        self._groups = sizes.groups
        poison = iter(range(1, 1 << 40))
        self._memory = [
            [
                [[mix(next(poison)) for _ in range(g.page_tokens)] for _ in range(pages)]
                for g, pages in zip(sizes.groups, sizes.pages, strict=True)
            ]
            if self.contents
            else []
            for _ in range(sizes.domains)
        ]
        self._snapshots: dict[tuple[int, int, int], list[int]] = {}

    def submit(self, plan: StepPlan) -> None:
        if len(self._open) >= 2:
            raise InternalError("three plans are open")
        self._open.append(self._execute(plan))

    def collect(self) -> StepResult:
        result = self._open.popleft()
        if self.clock is not None:
            self.clock.advance(result.seconds)
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.collect()

    def close(self) -> None:
        self._open.clear()
        self._slots.clear()

    # -- a step ------------------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.released:
            self._slots.pop(slot, None)
        for entry in plan.new:
            if entry.slot in self._slots:
                raise InternalError(f"slot {entry.slot} is taken twice")
            tables: list[dict[int, int]] = [{} for _ in self._groups]
            self._slots[entry.slot] = _Slot(entry, tables, self._poisoned(), entry.sample_index)
        for grant in plan.pages:
            table = self._slots[grant.slot].tables[grant.group]
            table.update(enumerate(grant.pages, grant.first))
        for move in plan.moves:
            self._move(move)
        runs: list[RunResult] = []
        for segment in plan.segments:
            if len(segment.ranks) != self._sizes.domains:
                raise InternalError(
                    f"{len(segment.ranks)} rank lists, {self._sizes.domains} domains"
                )
            if any(not rank.runs and not rank.padding for rank in segment.ranks):
                raise InternalError("an idle domain was given no dummy token")
            for domain, rank in enumerate(segment.ranks):
                runs += [self._run(plan.step, domain, run) for run in rank.runs]
        seconds = sum(self.cost.of(segment.ranks) for segment in plan.segments)
        return StepResult(plan.step, tuple(runs), seconds)

    def _poisoned(self) -> list[list[int]]:
        """Slot states nobody initialised: wrong on purpose until zeroed or loaded."""
        return [
            [mix(77)] * (1 if g.rewind is Rewind.SNAPSHOT else ring_size(g))
            if g.kind is GroupKind.STATE
            else []
            for g in self._groups
        ]

    def _move(self, move: StateMove) -> None:
        state = self._slots[move.slot].states
        place = (move.domain, move.group, move.snapshot)
        if move.kind == "zero":
            state[move.group] = [0] * len(state[move.group])
        elif move.kind == "save":
            if not 0 <= move.snapshot < self._sizes.places(move.group):
                raise InternalError(f"snapshot place {move.snapshot} does not exist")
            self._snapshots[place] = list(state[move.group])
        elif move.kind == "load":
            state[move.group] = list(self._snapshots[place])
        else:
            raise InternalError(f"unknown move {move.kind!r}")

    def _run(self, step: int, domain: int, run: TokenRun) -> RunResult:
        slot = self._slots[run.slot]
        if slot.entry.domain != domain:
            raise InternalError(f"slot {run.slot} runs outside its domain")
        message = self.faults.get((step, slot.entry.request_id), "")
        if message:
            return RunResult(run.slot, error=message)
        tokens = self._filled(slot, run)
        views = [
            self._compute(domain, slot, adapted(token, slot.entry.adapter), position)
            for position, token in enumerate(tokens, run.start)
        ]
        rows = self._prompt_rows(slot, run, views)
        if not run.samples:
            return RunResult(run.slot, prompt_logprobs=rows)
        answer = self._sample(slot, run, tokens, views, rows)
        self._propose(domain, slot, run)
        return answer

    def _filled(self, slot: _Slot, run: TokenRun) -> list[int]:
        """The run's ids, with what only the device knows in place of the placeholders.

        Raises:
            InternalError: more drafts are wanted than were proposed.
        """
        known = len(run.tokens) - run.drafts
        tokens = [slot.latest if token == PENDING else token for token in run.tokens[:known]]
        for i, token in enumerate(run.tokens[known:]):
            if token == PENDING and i >= len(slot.proposals):
                raise InternalError(f"slot {run.slot} has no proposal {i}")
            tokens.append(slot.proposals[i] if token == PENDING else token)
        return tokens

    def _propose(self, domain: int, slot: _Slot, run: TokenRun) -> None:
        """Make the proposals asked for, and write beyond the run as a drafter does.

        What stands there is nonsense until the positions are computed; nobody may read it before.
        """
        for position in range(run.end, run.end + run.proposals - 1) if self.contents else ():
            for group in self._groups:
                if group.kind is not GroupKind.STATE:
                    page, cell = divmod(position, group.page_tokens)
                    self._page(domain, slot, group, page)[cell] = mix(position, run.slot)
        slot.proposals = []
        if run.proposals:
            if self.proposer is None:
                raise InternalError("proposals are asked of a device that makes none")
            name, count = slot.entry.request_id, run.proposals
            slot.proposals = list(self.proposer.propose(name, slot.sampled, count))

    def _sample(
        self,
        slot: _Slot,
        run: TokenRun,
        tokens: list[int],
        views: list[int],
        rows: tuple[TokenLogprobs, ...],
    ) -> RunResult:
        first = len(tokens) - run.drafts - 1  # the row that predicts the first draft
        seed = slot.entry.params.seed
        drawn: list[int] = []
        for row in range(first, len(tokens)):
            drawn.append(next_token(views[row], self.vocab, seed, slot.sampled + len(drawn)))
            if row + 1 < len(tokens) and tokens[row + 1] != drawn[-1]:
                break
        slot.sampled += len(drawn)
        slot.latest = drawn[-1]
        logprobs: tuple[TokenLogprobs, ...] = ()
        if slot.entry.params.logprobs is not None:
            logprobs = tuple(TokenLogprobs(token, -1.0) for token in drawn)
        return RunResult(run.slot, tuple(drawn), logprobs, rows, len(drawn) - 1)

    def _prompt_rows(
        self, slot: _Slot, run: TokenRun, views: list[int]
    ) -> tuple[TokenLogprobs, ...]:
        """Pseudo log-probabilities of prompt tokens, one for each logits row that has one."""
        entry = slot.entry
        if entry.params.prompt_logprobs is None:
            return ()
        found = []
        for position in range(run.end - run.logits, run.end):
            if position + 1 < entry.prompt_len:
                value = -float(views[position - run.start] % 4096)
                found.append(TokenLogprobs(entry.prompt[position + 1], value))
        return tuple(found)

    # -- the pseudo-model --------------------------------------------------------------------------

    def _compute(self, domain: int, slot: _Slot, token: int, position: int) -> int:
        if not self.contents:
            return mix(slot.entry.slot, position)
        groups = self._groups
        base = mix(token, position, *(self._view(domain, slot, g, position, 0) for g in groups))
        for group in groups:
            g = group.index
            if group.kind is not GroupKind.STATE:
                page, cell = divmod(position, group.page_tokens)
                self._page(domain, slot, group, page)[cell] = mix(base, g)
            elif group.rewind is Rewind.SNAPSHOT:
                before = 0 if _cleaned(group, position) else slot.states[g][0]
                slot.states[g][0] = mix(before, base)
            else:
                slot.states[g][position % len(slot.states[g])] = mix(base, g)
        return mix(base, *(self._view(domain, slot, g, position, 1) for g in groups))

    def _page(self, domain: int, slot: _Slot, group: GroupSpec, page: int) -> list[int]:
        found = slot.tables[group.index].get(page)
        if found is None:
            raise InternalError(
                f"slot {slot.entry.slot} has no page for entry {page} of group {group.name}"
            )
        return self._memory[domain][group.index][found]

    def _view(self, domain: int, slot: _Slot, group: GroupSpec, position: int, own: int) -> int:
        """What `position` reads from one group, through the tables of the plan."""
        begin, end = readable(group, position)
        end = min(end, position + own)
        if group.kind is GroupKind.STATE:
            state = slot.states[group.index]
            if group.rewind is Rewind.SNAPSHOT:
                return 0 if not own and _cleaned(group, position) else state[0]
            size = len(state)
            return sum(state[at % size] for at in range(begin, end)) & _MASK
        span, total = group.page_tokens, 0
        while begin < end:
            page = begin // span
            stop = min(end, (page + 1) * span)
            cells = self._page(domain, slot, group, page)
            total += (page + 1) * sum(cells[begin - page * span : stop - page * span])
            begin = stop
        return total & _MASK
