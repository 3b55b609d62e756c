"""What runs before ready: steps of every phase, in every size where kernels change form, and the
largest that the scheduler can build.

Those come last, behind the captures of steps: a capture gives back what the allocator kept, and
smaller steps fit into the largest's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from metainfer.core.request import SamplingParams
from metainfer.core.step import (
    NO_ADAPTER,
    NewRequest,
    PageGrant,
    Phase,
    RankTokens,
    Segment,
    StepPlan,
    TokenRun,
)
from metainfer.kv.book.spec import GroupKind, GroupSpec

CPU_LIMIT_TOKENS = 16
SIZES = (24, 64, 128, 512, 1024)
"""Tokens of chunks between a few and the most: kernels change form there, and are then compiled."""
SHORT = 16
WIDENS_FROM = 2048
"""Context from which on, at each doubling, a short chunk is warmed: tables of pages are as wide as
a chunk's contexts ask, and kernels change form by their width."""
GREEDY = SamplingParams(temperature=0.0)
DRAWS = (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=50, top_p=0.95))
"""Beside the likeliest token, which every warm step asks for: what else the sampler launches."""

Runs = list[tuple[int, int]]
"""Start and length of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The steps to run, by an executor's limits. `cpu`: kernels have one form, and a step of full
    size would cost seconds. `drafts`: most in a run; `mixed_tokens`: most tokens of a segment that
    prompts and decodes share, which a prompt's last token alone does, too; 0: none."""

    step_tokens: int
    max_context: int
    slots: int
    drafts: int
    mixed_tokens: int
    cpu: bool

    def before(self) -> Iterator[tuple[Phase, Runs, SamplingParams]]:
        """What runs before anything is captured."""
        short, verified = self._most(SHORT), self._most(1 + self.drafts)
        yield Phase.CHUNK, [(0, 1)], GREEDY  # attention tiles its queries by their number
        yield Phase.CHUNK, [(0, short)], GREEDY
        if not self.cpu:
            for count in SIZES:
                if count < self._most(self.step_tokens):
                    yield Phase.CHUNK, [(0, count)], GREEDY
            for doubled in range((self.max_context // WIDENS_FROM).bit_length()):
                yield Phase.CHUNK, [self._at_end(short, WIDENS_FROM << doubled)], GREEDY
        if self.mixed_tokens > 1 and self.slots > 1:
            yield Phase.MIXED, [(0, self._most(min(SHORT, self.mixed_tokens - 1))), (0, 1)], GREEDY
        if 1 < self.mixed_tokens < self.step_tokens and not self.cpu:
            # Chunks and short ones are computed by layouts of their own.
            for count in SIZES:
                if count < self._most(self.mixed_tokens):
                    yield Phase.MIXED, [(0, count)], GREEDY
        yield Phase.DECODE, [(0, 1), (0, 1)][: self.slots], GREEDY
        yield Phase.DECODE, [self._at_end(1)], GREEDY
        if self.drafts:
            yield Phase.VERIFY, [(0, verified)], GREEDY
            yield Phase.VERIFY, [self._at_end(verified)], GREEDY
        for params in DRAWS if not self.cpu else ():
            yield Phase.DECODE, [(0, 1)], params

    def largest(self) -> Iterator[tuple[Phase, Runs]]:
        """The largest steps, all of their runs at the end of the context: with every request, and
        last the one of most tokens in fewest requests."""
        if self.cpu:
            yield Phase.CHUNK, [self._at_end(self._most(CPU_LIMIT_TOKENS))]
            return
        if self.mixed_tokens > 1:  # of one request too: a prompt below the border
            yield Phase.MIXED, self._long_and_short()
        yield Phase.DECODE, [self._at_end(1)] * self.slots
        if self.drafts:
            yield Phase.VERIFY, self._shared(self.slots * (1 + self.drafts))
        yield Phase.CHUNK, self._shared(self.step_tokens)
        whole, rest = divmod(self.step_tokens, self.max_context)
        lengths = [self.max_context] * whole + [rest] * bool(rest)
        yield Phase.CHUNK, [self._at_end(length) for length in lengths[: self.slots]]

    def _most(self, tokens: int) -> int:
        """`tokens` as one run can have them."""
        return min(tokens, self.step_tokens, self.max_context)

    def _shared(self, tokens: int) -> Runs:
        """As many of `tokens` as a step can have, over all requests."""
        least, over = divmod(min(tokens, self.step_tokens), self.slots)
        shares = [least + (number < over) for number in range(self.slots)]
        return [self._at_end(self._most(share)) for share in shares]

    def _long_and_short(self) -> Runs:
        """All tokens and all requests of a mixed step, most tokens in few of them."""
        runs, left = [], self.mixed_tokens
        for others in reversed(range(self.slots)):
            runs.append(self._at_end(self._most(left - others)))
            left -= runs[-1][1]
        return runs

    def _at_end(self, tokens: int, context: int | None = None) -> tuple[int, int]:
        return (context or self.max_context) - tokens, tokens


def step_of(
    phase: Phase,
    runs: Runs,
    params: SamplingParams,
    *,
    groups: Sequence[GroupSpec],
    max_context: int,
    adapters: int,
    proposals: int,
    lists: int,
) -> StepPlan:
    """A step of one segment of `runs`, each a request of its own whose pages are all page 0, which
    nobody owns. Requests go through the `adapters` in turn; `proposals`: most that a model drafts
    behind a run; `lists`: domains that share the rows, each of which is given all of them.
    """
    slots = range(len(runs))
    proposals = min(proposals, max_context - max(sum(run) for run in runs))
    new = tuple(
        NewRequest("warm", slot, 0, (0,) * length, length, 0, params, adapter=place)
        for slot, (_, length) in zip(slots, runs, strict=True)
        for place in (slot % adapters if adapters else NO_ADAPTER,)
    )
    pages = tuple(
        PageGrant(slot, group.index, 0, (0,) * group.pages_for(start + length + proposals))
        for slot, (start, length) in zip(slots, runs, strict=True)
        for group in groups
        if group.kind is not GroupKind.STATE
    )
    tokens = tuple(
        TokenRun(slot, start, (0,) * length, 1 + drafts, drafts, True, proposals)
        for slot, (start, length) in zip(slots, runs, strict=True)
        for drafts in (length - 1 if phase is Phase.VERIFY else 0,)
    )
    return StepPlan(0, (Segment(phase, "warm", (RankTokens(tokens),) * lists),), new, pages)


def most_mixed(prefill_from: int, slots: int, drafts: int, step_tokens: int) -> int:
    """Most tokens of a step that holds fewer than `prefill_from` prompt tokens: every decode beside
    them may bring its drafts along."""
    return min(prefill_from - 1 + slots * (1 + drafts), step_tokens)


def named(phase: Phase, runs: Runs, params: SamplingParams = GREEDY) -> str:
    """A step in words, for who watches the start."""
    (start, _), tokens = runs[0], sum(length for _, length in runs)
    drawn = f", drawn by top_p {params.top_p}" if params is not GREEDY else ""
    where = f"from {start}" if len(runs) == 1 else f"in {len(runs)} runs"
    return f"{phase.value}, {tokens} tokens {where}{drawn}"
