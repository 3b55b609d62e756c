"""Drafts go where room is left: after every running sequence of a domain has its due tokens.

So a draft never takes a token of the step's budget, a page or a snapshot place that a due token of
this step wants, and when pages run out later, those that only drafts wanted come back first
(`reclaim`): nothing is ever preempted for a draft.
"""

from __future__ import annotations

from metainfer.core.errors import InternalError
from metainfer.core.step import PENDING, TokenRun
from metainfer.core.verdict import Verdict
from metainfer.kv.book.manager import Account
from metainfer.scheduler.build import Build
from metainfer.scheduler.config import DraftSource, SchedulerConfig
from metainfer.scheduler.domain import Domain
from metainfer.scheduler.sequence import Sequence


class Drafting:
    """Turns decode runs of a plan under construction into verify runs.

    With a `source`, drafts are ids that follow the known tokens, so a sequence sits out while a
    token of it is being sampled. The device's own drafts are placeholders: only a verify run in
    flight, whose end nobody knows, makes its sequence sit out.
    """

    def __init__(self, config: SchedulerConfig, source: DraftSource | None) -> None:
        self._most = config.max_drafts
        self._device = config.model_drafts
        self.source = source

    @property
    def active(self) -> bool:
        return self._most > 0 and (self._device or self.source is not None)

    def extend(self, domain: Domain, build: Build, spare: int) -> int:
        """Add drafts, up to `spare` tokens in all, to the decode runs planned for `domain`.

        Returns how many were added.
        """
        left = spare
        for entries in (build.short[domain.index], build.chunks[domain.index]):
            for at, (seq, run) in enumerate(entries):
                if not run.samples:
                    continue
                drafts: tuple[int, ...] = ()
                if len(run.tokens) == 1:
                    drafts = self._drafts(domain, seq, run.end, left)
                if drafts:
                    build.moves += domain.kv.checkpoint(_account(seq), run.start)
                    left -= len(drafts)
                run = self._extended(domain, build, seq, run, drafts)
                entries[at] = (seq, run)
                seq.hold = run if drafts or not self._device else None
                seq.proposals = run.proposals
        return spare - left

    def _extended(
        self, domain: Domain, build: Build, seq: Sequence, run: TokenRun, drafts: tuple[int, ...]
    ) -> TokenRun:
        """The run with its drafts, and with the proposals it shall make; pages for both."""
        kv, account = domain.kv, _account(seq)
        total = run.end + len(drafts)
        proposals = 0
        if self._device:
            # Proposal i is computed from an entry of the drafter at `total + i - 1`.
            last = min(seq.stop_at - run.end - 1, seq.stop_at - total + 1)
            proposals = max(0, min(self._most, kv.draft_limit, last))
            if proposals:
                proposals = kv.fit(account, total + proposals - 1) - total + 1
        reach = total + max(proposals - 1, 0)
        if reach > account.covered:
            grants = kv.reserve(account, reach)
            if isinstance(grants, Verdict):
                raise InternalError(f"pages vanished while drafting: {grants.reasons}")
            build.pages += grants
        if not drafts and not proposals:
            return run
        return TokenRun(
            run.slot,
            run.start,
            run.tokens + drafts,
            max(run.logits, 1 + len(drafts)),
            len(drafts),
            True,
            proposals,
        )

    def _drafts(self, domain: Domain, seq: Sequence, end: int, spare: int) -> tuple[int, ...]:
        """Drafts for a run that ends at `end`, as many as limits, budget and pages allow."""
        kv = domain.kv
        limit = min(self._most, kv.draft_limit, seq.stop_at - end, spare)
        if self._device:
            limit = min(limit, seq.proposals)
        limit = min(limit, kv.fit(_account(seq), end + max(limit, 0)) - end)
        if limit <= 0 or not kv.can_checkpoint:
            return ()
        if self.source is None:
            return (PENDING,) * limit
        return tuple(self.source.propose(seq.request, seq.tokens, limit))[:limit]

    def reclaim(self, domain: Domain) -> bool:
        """Take back pages that nothing but drafts wanted; True when planning must wait.

        Pages under a verify run in flight come back with its result: an accepted draft keeps its
        page. All others are free for the taking, since a device executes plans in order.
        """
        waits = False
        for seq in domain.running:
            account = seq.account
            if account is None:
                continue
            if seq.hold is not None and seq.hold.drafts:
                waits = True
            else:
                domain.kv.trim(account, max(seq.planned, account.length))
        return waits

    def forget(self, seq: Sequence) -> None:
        """The sequence ended or was put back."""
        seq.hold, seq.proposals = None, 0
        if self.source is not None:
            self.source.forget(seq.request_id)


def _account(seq: Sequence) -> Account:
    assert seq.account is not None
    return seq.account
