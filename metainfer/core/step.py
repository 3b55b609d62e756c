"""The two types that cross between scheduling and executing: `StepPlan` and `StepResult`.

Every executor speaks exactly these: the null device, one process, many ranks, Ray. They hold
numbers, never tensors, and travel as msgpack. A plan is a *diff*: a request is described once,
when it enters (`NewRequest`), and by its slot afterwards.

A step is a list of segments. A segment is the unit that one layout and one graph serve; prefill
chunks and decodes may share one (`Phase.MIXED`) or stand in two. Token lists are per rank: in
tensor parallelism every rank of a domain has the same list; with data-parallel attention each has
its own, and an idle rank computes `padding` dummy tokens so that collectives match.

Results may arrive one step late: while step n runs, step n+1 is planned with `PENDING` in place of
the token that n will sample; the device puts it in. Speculation: a run's last `drafts` tokens are
proposals; the result carries the accepted ones plus one (`tokens` has 1 .. drafts + 1 entries).
Where the device proposes by itself, they are `PENDING` too: the first of those that it made after
the slot's latest sampling run.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from metainfer.core.request import FinishReason, SamplingParams

PENDING = -1
"""Placeholder token id, known only on the device: the latest token sampled for this slot or, among
a run's drafts, a token that the device proposed."""

ALL_LAYERS = -1

NO_ADAPTER = -1
"""`NewRequest.adapter` of a request to the model itself."""

NON_FINITE = "non_finite_logits"
"""`RunResult.code` of a run that met NaN or infinity."""

OUT_OF_MEMORY = "out_of_memory"
"""`RequestOutput.code` of a request for which memory did not suffice, though it ran alone."""


class Phase(StrEnum):
    """Phase classes: kernels are chosen per class, never borrowed from a neighbour."""

    CHUNK = "chunk"  # prefill only
    MIXED = "mixed"  # prefill chunks and decodes in one segment
    DECODE = "decode"  # one query token per sequence
    VERIFY = "verify"  # 1 + drafts query tokens per sequence
    DRAFT = "draft"


class TokenRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one request, computed in this step.

    `slot`: the request's row in per-request device tables. `start`: absolute position of the first
    token. `tokens`: ids; `PENDING` where only the device knows. The last `drafts` of them are
    speculative. `logits`: how many of the last rows need logits (0 for a chunk that does not end
    the prompt, 1 + drafts when sampling, all rows for prompt log-probabilities); sampling happens
    iff `samples`. `proposals`: how many drafts the device shall propose for the tokens after the
    one sampled last; pages exist for ``proposals - 1`` positions beyond the run (ADR 0010).
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    logits: int = 0
    drafts: int = 0
    samples: bool = False
    proposals: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class RankTokens(msgspec.Struct, frozen=True, array_like=True):
    """What one rank computes in a segment; `padding` dummy tokens follow the runs.

    `drafting`: rows that every rank computes in each further step of a model that drafts, where
    ranks of several domains meet in it (`drafting_rows`); empty: as many as its runs ask for.
    """

    runs: tuple[TokenRun, ...]
    padding: int = 0
    drafting: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """One launch of the model. `layout` names a layout of the plan, `bucket` a captured graph.

    `bucket` is the padded token count of a static-step graph, 0 for eager. `stop_layer`: layers
    from here on are not run (`ALL_LAYERS` = run everything); draft taps and staged prefill use it.
    """

    phase: Phase
    layout: str
    ranks: tuple[RankTokens, ...]
    bucket: int = 0
    drafts: int = 0
    stop_layer: int = ALL_LAYERS


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request enters (or re-enters after preemption) and takes `slot` in KV domain `domain`.

    `computed`: tokens whose cache entries were found, so that computation starts there. `prompt`
    holds prompt and, after preemption, the tokens generated so far; `prompt_len` tells them apart
    (penalties count generated tokens only). `adapter`: its place among those loaded at start.
    """

    request_id: str
    slot: int
    domain: int
    prompt: tuple[int, ...]
    prompt_len: int
    computed: int
    params: SamplingParams
    sample_index: int = 0  # tokens sampled before: keeps a seeded stream unbroken by preemption
    eos_token_ids: tuple[int, ...] = ()  # banned from the draw until `min_tokens`
    adapter: int = NO_ADAPTER


class PageGrant(msgspec.Struct, frozen=True, array_like=True):
    """Pages given to a slot: `pages[i]` becomes entry `first + i` of its table in `group`."""

    slot: int
    group: int
    first: int
    pages: tuple[int, ...]


class StateMove(msgspec.Struct, frozen=True, array_like=True):
    """Slot-state bookkeeping on the device, done before the segments run.

    `kind` is ``save`` (slot -> snapshot), ``load`` (snapshot -> slot) or ``zero`` (fresh slot).
    """

    kind: str
    group: int
    domain: int
    slot: int
    snapshot: int = -1


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy one page before the segments run (a shared, partly filled page is written to)."""

    group: int
    domain: int
    source: int
    target: int


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Everything an executor needs to advance by one step, as a diff to the step before."""

    step: int
    segments: tuple[Segment, ...]
    new: tuple[NewRequest, ...] = ()
    pages: tuple[PageGrant, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    moves: tuple[StateMove, ...] = ()
    released: tuple[int, ...] = ()  # slots that hold no request any more

    @property
    def tokens(self) -> int:
        """Real tokens computed, counted once per domain rank list."""
        return sum(rank.tokens for segment in self.segments for rank in segment.ranks)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, and the most likely alternatives in falling order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # 1 = the most likely


class RunResult(msgspec.Struct, frozen=True, array_like=True):
    """What one run produced. `tokens` may hold several (accepted drafts and one more).

    `error` is a fault of this request alone (for example a NaN in its logits); the others go on.
    `code` names its kind in a stable word (``non_finite_logits``), empty where there is none.
    """

    slot: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    accepted_drafts: int = 0
    error: str = ""
    code: str = ""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the plan of the same `step`; may be handed over one step late.

    `rank_digest` is the hash of the ranks' decisions, equal on all or the step is an error.
    `seconds` is device time where the executor can tell, wall time otherwise.
    """

    step: int
    runs: tuple[RunResult, ...]
    seconds: float = 0.0
    rank_digest: str = ""


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """What leaves the engine for one request after one step.

    `index` is the position of the first of `tokens` among the generated tokens. The last output of
    a request has `finish` set; `stop_token` then names the id that ended it (not in `tokens`).
    `queue_s`: seconds from its arrival at the scheduler to its first step; known with the first of
    its tokens, later outputs may leave it out. `code`: the kind of `error`, as in `RunResult`.
    """

    request_id: str
    tokens: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    error: str = ""
    queue_s: float | None = None
    code: str = ""
