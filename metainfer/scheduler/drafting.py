"""Drafts go where room is left: after every running sequence of a domain has its due tokens.

So a draft never takes a token of the step's budget, a page or a snapshot place that a due token of
this step wants, and when pages run out later, those that only drafts wanted come back first
(`reclaim`): nothing is ever preempted for a draft.
"""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.errors import InternalError
from metainfer.core.step import PENDING, StepResult, TokenRun
from metainfer.core.verdict import Verdict
from metainfer.kv.book.manager import Account
from metainfer.scheduler.build import Build, Flight
from metainfer.scheduler.config import DraftSource, SchedulerConfig
from metainfer.scheduler.depth import DepthController
from metainfer.scheduler.domain import Domain
from metainfer.scheduler.sequence import Sequence

AHEAD, SHARE, MOST_CREDIT = 0.45, 0.01, 4.0
"""Steps that drafts may cost a request before any was right, where its kind is trusted; part of its
tokens that they may cost further; steps that it can have in hand (seeds)."""
MEMORY = 16.0
"""Requests of a kind after which what their drafts brought has faded to 1/e (seed)."""


@dataclass(slots=True)
class Kind:
    """Requests alike, greedy or drawn: whether drafts brought them something, by a fading mean.

    Drawn answers wander, so that they begin without trust.
    """

    mean: float

    @property
    def trusted(self) -> bool:
        return self.mean >= 0

    def ended(self, brought: float) -> None:
        """A request that drafted ended, `brought` steps better off."""
        brought = max(-1.0, min(1.0, brought))
        self.mean += (brought - self.mean) / MEMORY


class Drafting:
    """Turns decode runs of a plan under construction into verify runs.

    With a `source`, drafts are ids that follow the known tokens, so a sequence sits out while a
    token of it is being sampled. The device's own drafts are placeholders: only a verify run in
    flight, whose end nobody knows, makes its sequence sit out.
    """

    def __init__(self, config: SchedulerConfig, source: DraftSource | None) -> None:
        self._device = config.model_drafts
        self.source = source
        self.active = config.max_drafts > 0 and (self._device or source is not None)
        self.aimed = config.max_drafts if self.active else 0  # drafts per run in this step
        self.seconds = 0.0  # on the host, for this step
        self._decoding = 0
        adapts = self.active and config.adaptive_drafts
        self._depth = DepthController(config.max_drafts) if adapts else None
        self._brought: dict[str, float] = {}  # request -> steps that its drafts saved so far
        self._kinds = {True: Kind(0.0), False: Kind(-0.25)}  # by whether greedy

    def aim(self, decoding: int) -> None:
        """Set the depth of a step in which `decoding` sequences of a domain decode at most."""
        self._decoding, self.seconds = decoding, 0.0
        if self._depth is not None:
            self.aimed = self._depth.aim(decoding)

    def planned(self, flight: Flight) -> None:
        """Remember with a plan what was aimed for."""
        flight.decoding, flight.aimed = self._decoding, self.aimed
        flight.drafting_s = self.seconds

    def note(self, flight: Flight, result: StepResult) -> None:
        """A step came back. Its time tells of depths where it did nothing but decode."""
        if self._depth is None or not flight.decoding:
            return
        runs, alone = [], True
        for (seq, run), answer in zip(flight.entries, result.runs, strict=True):
            decodes = run.samples and run.start + 1 >= seq.prompt_len
            if run.drafts and not seq.done:
                cost = self._depth.extra(flight.decoding, run.drafts)
                before = self._brought.get(seq.request_id, 0.0)
                after = before + answer.accepted_drafts - cost
                self._brought[seq.request_id] = min(after, MOST_CREDIT)
            if decodes and len(run.tokens) == 1 + run.drafts:
                runs.append((run.drafts, answer.accepted_drafts))
            else:
                alone = False
        seconds = result.seconds + flight.drafting_s if alone and result.seconds > 0 else None
        self._depth.note(flight.decoding, flight.aimed, runs, seconds)

    def _affordable(self, seq: Sequence) -> int:
        """Drafts that the request can pay for if all are wrong: its text may not be like the
        others', which need not lose their drafts for it, nor it its time for theirs."""
        if self._depth is None:
            return self.aimed
        hand = self._brought.get(seq.request_id, 0.0)
        hand += SHARE * (len(seq.tokens) - seq.prompt_len)
        hand += AHEAD * self._kinds[seq.request.params.greedy].trusted
        depth = self.aimed
        while depth and self._depth.extra(self._decoding, depth) > hand:
            depth -= 1
        return depth

    @property
    def alarm(self) -> str:
        """One line while drafts are never accepted; empty otherwise."""
        return "" if self._depth is None else self._depth.alarm

    @property
    def gain(self) -> float | None:
        """Tokens per second over those without drafts; None where the depth is fixed."""
        return None if self._depth is None else self._depth.gain

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

    def skip(self, domain: Domain) -> None:
        """No drafts in this step: what the device proposed before is for the tokens passed now."""
        if self.active and self._device:
            for seq in domain.running:
                seq.proposals = 0

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
            proposals = max(0, min(self.aimed, kv.draft_limit, last))
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
        limit = min(self._affordable(seq), kv.draft_limit, seq.stop_at - end, spare)
        if self._device:
            limit = min(limit, seq.proposals)
        limit = min(limit, kv.fit(_account(seq), end + max(limit, 0)) - end)
        if limit <= 0 or not kv.can_checkpoint:
            return ()
        if self.source is None:
            return (PENDING,) * limit
        if len(seq.tokens) < end:
            return ()  # its last token is being sampled
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
        brought = self._brought.pop(seq.request_id, None)
        if brought is not None:
            self._kinds[seq.request.params.greedy].ended(brought)
        if self.source is not None:
            self.source.forget(seq.request_id)


def _account(seq: Sequence) -> Account:
    assert seq.account is not None
    return seq.account
