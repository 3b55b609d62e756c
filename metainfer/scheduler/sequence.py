"""One request on its way: what is known, what is planned, what is held.

Counting tokens replaces phases. `known` tokens have an id or are being sampled right now; `planned`
positions are computed or under way; the difference is due. A prompt is a sequence with much due, a
decode one with a single token due, a resumed one has prompt and answer due.
"""

from __future__ import annotations

from metainfer.core.request import Request
from metainfer.core.step import NO_ADAPTER, TokenRun
from metainfer.kv.book.manager import Account
from metainfer.kv.book.prefix import Prefix


class Sequence:
    """Mutable state of one request, owned by the scheduler.

    `tokens`: prompt and confirmed answer. `limit`: most tokens in all. `stop_at`: positions that
    ever need computing (the last token of an answer does not). `account` is None while it waits.
    """

    __slots__ = (
        "account",
        "adapter",
        "added_s",
        "cached_tokens",
        "domain",
        "done",
        "hold",
        "in_flight",
        "index",
        "known",
        "last_token_s",
        "limit",
        "min_total",
        "order",
        "overtaken",
        "planned",
        "preempted",
        "prefix",
        "prompt_len",
        "prompt_noted",
        "proposals",
        "queue_s",
        "request",
        "request_id",
        "rows_done",
        "rows_planned",
        "samples",
        "share",
        "slot",
        "stop_at",
        "stops",
        "tokens",
        "wants_rows",
    )

    def __init__(
        self, request: Request, index: int, max_context: int, added_s: float = 0.0
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.index = index
        self.order = (request.priority, index)
        self.tokens = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.samples = params.max_tokens > 0
        self.limit = min(self.prompt_len + params.max_tokens, max_context)
        self.stop_at = self.limit - 1 if self.samples else self.prompt_len
        # Under a grammar an end is drawn early only where nothing else may be (`SamplingParams`).
        self.min_total = self.prompt_len + (0 if params.grammar else params.min_tokens)
        eos = () if params.ignore_eos else request.eos_token_ids
        self.stops = frozenset(eos + params.stop_token_ids)  # membership only
        self.wants_rows = params.prompt_logprobs is not None
        self.known = self.prompt_len
        self.planned = 0
        self.rows_done = 0  # prompt rows whose log-probabilities were delivered
        self.rows_planned = 0
        self.in_flight = 0  # planned steps whose result is awaited
        self.hold: TokenRun | None = None  # in flight, and nobody knows where the next one starts
        self.proposals = 0  # drafts that the device made, or will have made, after its latest run
        self.done = False
        self.share = 0
        self.adapter = NO_ADAPTER
        self.domain = 0
        self.slot = -1
        self.account: Account | None = None
        self.prefix: Prefix | None = None
        self.prompt_noted = False
        self.cached_tokens = 0
        self.preempted = 0
        self.overtaken = 0  # requests that passed while this one headed the queue
        self.last_token_s = 0.0
        self.added_s = added_s
        self.queue_s: float | None = None  # until its first step

    @property
    def due(self) -> int:
        """Tokens that could be computed now."""
        return min(self.known, self.stop_at) - self.planned

    @property
    def uses_cache(self) -> bool:
        """Prompt log-probabilities need every prompt row computed, until they are delivered."""
        return not self.wants_rows or self.rows_done >= self.prompt_len
