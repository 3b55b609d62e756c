"""The scheduler: requests in, step plans out, results in, outputs out. No tensors, no threads.

Each step every running decode gets its token, prompts share what the bounds leave over, and pages
are reserved in the order (priority, arrival). When they run out, the last in that order is
preempted and recomputed later, never an earlier one: the first always progresses.

`schedule` may run once more before the previous result is committed. Tokens still unknown are
`PENDING`; tokens of a request that ended meanwhile are discarded; a sequence whose next position is
unknown (a verify run is in flight) sits out. A preempted sequence keeps tokens that arrive late.

Pages and slots are given back at once, even while a step that uses them is in flight: devices
execute plans in order, and reuse is only ever planned in a later plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from metainfer.core.clock import Clock, SystemClock
from metainfer.core.errors import InternalError, RequestError, UsageError
from metainfer.core.request import FinishReason, Request
from metainfer.core.step import PENDING, NewRequest, RequestOutput, StepPlan, StepResult, TokenRun
from metainfer.core.verdict import Verdict
from metainfer.kv.book import audit
from metainfer.kv.book.manager import Hit, KVManager
from metainfer.scheduler.adapters import Adapters
from metainfer.scheduler.build import Build, Flight
from metainfer.scheduler.config import DraftSource, SchedulerConfig
from metainfer.scheduler.domain import Domain
from metainfer.scheduler.drafting import Drafting
from metainfer.scheduler.metrics import Counters, DraftWatch, RepeatWatch, Stats
from metainfer.scheduler.receive import Receiver
from metainfer.scheduler.sequence import Sequence
from metainfer.scheduler.share import share
from metainfer.scheduler.trials import Trials

_NEVER = 1 << 60

DEPTH = 2
"""Plans that may be without a result at once: one running, one queued behind it."""


class Scheduler:
    """One central scheduler over one KV account per domain.

    A request is pinned to a domain when it is added: the one with the least due tokens, counting
    the request itself less what that domain has cached.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: Seq[KVManager],
        clock: Clock | None = None,
        drafts: DraftSource | None = None,
    ) -> None:
        config.check()
        slots = min(manager.sizes.slots for manager in kv)
        if config.max_running > slots:
            raise UsageError(
                f"max_running {config.max_running} exceeds the {slots} slots of the caches.",
                f"Set max_running to {slots} or less.",
            )
        self.config = config
        self.clock = clock or SystemClock()
        self.counters = Counters()
        self.domains = [Domain(i, manager, config.max_running) for i, manager in enumerate(kv)]
        self.draft_watch, self.repeat_watch = DraftWatch(), RepeatWatch()
        self.drafting = Drafting(config, drafts)
        self._adapters = Adapters(config.adapters)
        self._sequences: dict[str, Sequence] = {}
        self._flights: deque[Flight] = deque()
        self._build = Build(len(self.domains))
        self._receiver = Receiver(self)
        self.trials = Trials(self)
        self._arrivals = 0
        self._step = 0

    # -- requests ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run (``context_length_exceeded``, ``out_of_memory``,
                ``invalid_value``, ``model_not_found``) or not now (``queue_full``, status 429).
        """
        try:
            self.check(request)
        except RequestError:
            self.counters.rejected += 1
            raise
        if not self.has_work:
            self.trials.reset()
        now = self.clock.now()
        seq = Sequence(request, self._arrivals, self.config.max_context, now)
        self._arrivals += 1
        seq.adapter = self._adapters.place(request.adapter)
        content = self._adapters.digest(request.adapter)
        seq.prefix = self.domains[0].kv.prefix(seq.tokens, request.cache_salt, content)
        domain = self._place(seq)
        seq.domain = domain.index
        domain.enqueue(seq)
        self._sequences[request.request_id] = seq
        self.counters.requests += 1

    def check(self, request: Request) -> None:
        """Raise what `add` would raise now."""
        prompt, config = len(request.prompt), self.config
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use.", param="request_id")
        self._adapters.check(request.adapter)
        if not prompt:
            raise RequestError("the prompt is empty.", "Send at least one token.", param="prompt")
        least = prompt + (1 if request.params.max_tokens else 0)
        if least > config.max_context:
            raise RequestError(
                f"the prompt has {prompt} tokens; with at least one token of answer that exceeds "
                f"the context of {config.max_context} tokens.",
                f"Shorten the prompt to {config.max_context - (least - prompt)} tokens.",
                param="prompt",
                code="context_length_exceeded",
            )
        total = min(prompt + request.params.max_tokens, config.max_context)
        total -= 1 if request.params.max_tokens else 0  # the last token is never fed back
        verdict = self.domains[0].kv.fits(total)
        if not verdict.accepted:
            raise _too_large(total, verdict)
        if self.waiting >= config.max_waiting:
            raise RequestError(
                f"{self.waiting} requests are waiting already.",
                "Try again later.",
                status=429,
                error_type="rate_limit_error",
                code="queue_full",
                retry_after_s=1.0,
            )

    def _place(self, seq: Sequence) -> Domain:
        if len(self.domains) == 1:
            return self.domains[0]
        assert seq.prefix is not None
        best, least = self.domains[0], -1
        for domain in self.domains:
            found = domain.kv.match(seq.prefix, seq.known).tokens if seq.uses_cache else 0
            cost = domain.backlog() + seq.known - found
            if least < 0 or cost < least:
                best, least = domain, cost
        return best

    def cancel(
        self, request_id: str, finish: FinishReason = FinishReason.CANCELLED
    ) -> RequestOutput | None:
        """End a request now and return its last output; None when it is unknown or has ended.

        Its pages are free at once. `finish` is STOP when the server found a stop string.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            return None
        self.counters.cancelled += finish is FinishReason.CANCELLED
        self.retire(seq)
        self.domains[seq.domain].sweep()
        return RequestOutput(
            request_id,
            (),
            len(seq.tokens) - seq.prompt_len,
            finish=finish,
            cached_tokens=seq.cached_tokens,
        )

    def retire(self, seq: Sequence) -> None:
        """End a sequence: give back what it holds. The caller sweeps the running list."""
        domain = self.domains[seq.domain]
        seq.done = True
        del self._sequences[seq.request_id]
        if seq.account is None:
            domain.dequeue(seq)
        else:
            self._leave(domain, seq)

    def _leave(self, domain: Domain, seq: Sequence) -> None:
        if not self._build.withdraw(seq.slot):
            self._build.released.append(seq.slot)
        domain.vacate(seq)
        self.drafting.forget(seq)

    # -- a step ------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can be computed before a result is committed.

        Raises:
            InternalError: two plans are without a result already.
        """
        if len(self._flights) >= DEPTH:
            raise InternalError("schedule was called a third time without a commit")
        trials = self.trials
        trials.settle(self._sequences.get)
        for domain in self.domains:
            domain.begin_step()
            while self.running < trials.most_running and (
                found := domain.next_admissible(trials.wanted)
            ):
                self._admit(domain, *found)
        prompts, decodes = [], []
        for domain in self.domains:
            due, count = self._survey(domain)
            prompts.append(due)
            decodes.append(count)
        mixed = any(
            len(domain.running) > len(due)
            for domain, due in zip(self.domains, prompts, strict=True)
        )
        self.drafting.aim(
            max(len(d.running) - len(due) for d, due in zip(self.domains, prompts, strict=True))
        )
        for domain, due, count in zip(self.domains, prompts, decodes, strict=True):
            self._plan(domain, due, count, mixed)
        finished = self._build.finish(self._step, self.config)
        if finished is None:
            return None
        plan, flight = finished
        self.drafting.planned(flight)
        self._flights.append(flight)
        self._build = Build(len(self.domains))
        self._step += 1
        self.counters.steps += 1
        return plan

    def _admit(self, domain: Domain, seq: Sequence, hit: Hit) -> None:
        assert seq.prefix is not None
        if seq.in_flight:
            raise InternalError(f"{seq.request_id} re-enters while a result of it is awaited")
        kv, build = domain.kv, self._build
        domain.admit(seq)
        if seq.uses_cache:
            kv.note_lookup(seq.prefix, seq.known, hit)
            self.counters.cache_query_tokens += seq.known
            self.counters.cached_tokens += hit.tokens
        account, grants = kv.open(seq.slot, seq.prefix, hit)
        seq.account = account
        seq.planned = hit.tokens
        seq.rows_planned = seq.rows_done
        if not seq.preempted:
            seq.cached_tokens = hit.tokens
            seq.queue_s = self.clock.now() - seq.added_s
        build.pages += grants
        build.moves += kv.opening_moves(account)
        build.new.append(
            NewRequest(
                seq.request_id,
                seq.slot,
                domain.index,
                tuple(seq.tokens),
                seq.prompt_len,
                hit.tokens,
                seq.request.params,
                len(seq.tokens) - seq.prompt_len,
                seq.request.eos_token_ids,
                seq.adapter,
            )
        )

    def _survey(self, domain: Domain) -> tuple[list[Sequence], int]:
        """Running sequences with a prompt's worth of tokens due, and tokens due to decodes.

        A decode may be due several: what rejected drafts set a saved state back by. All get one,
        and the first in order what the step holds beyond that.
        """
        prompts, decodes, count = [], 0, 0
        few = 1 + self.config.max_drafts
        for seq in domain.running:
            # `seq.due` spelled out, here and in `_plan`: they look at every sequence in every step.
            due = (seq.known if seq.known < seq.stop_at else seq.stop_at) - seq.planned
            if due > few:
                prompts.append(seq)
            elif due > 0 and seq.hold is None:
                decodes, count = decodes + due, count + 1
        most = max(self.config.step_tokens - count, 0)
        domain.behind = min(decodes - count, most)
        return prompts, count + domain.behind

    def _plan(self, domain: Domain, prompts: list[Sequence], decodes: int, mixed: bool) -> None:
        """Give each running sequence of a domain its tokens, in order, preempting from the end."""
        budget = max(0, self.config.step_tokens - decodes)
        if mixed:
            budget = min(budget, self.config.mixed_prefill_tokens)
        budget = min(budget, self.trials.most_tokens)
        priorities = [seq.request.priority for seq in prompts]
        shares = share(priorities, [seq.due for seq in prompts], budget)
        for seq, tokens in zip(prompts, shares, strict=True):
            seq.share = tokens
        spare = self.config.step_tokens - decodes - sum(shares)
        few = 1 + self.config.max_drafts
        fast, grid = not self.drafting.aimed, domain.kv.grid if domain.kv.states else _NEVER
        running, runs, position = domain.running, self._build.short[domain.index], 0
        while position < len(running):
            seq = running[position]
            position += 1
            start = seq.planned
            due = (seq.known if seq.known < seq.stop_at else seq.stop_at) - start
            if due <= 0 or seq.hold is not None:
                continue
            account = seq.account
            assert account is not None
            # A decode whose page is there, off the grid of saved states: all that `_run` would do.
            if due == 1 and fast and seq.prompt_len <= start < account.covered and start % grid:
                token = PENDING if start == len(seq.tokens) else seq.tokens[start]
                seq.planned = start + 1
                seq.known += 1
                seq.in_flight += 1
                runs.append((seq, TokenRun(seq.slot, start, (token,), 1, 0, True)))
                continue
            wanted = seq.share
            if due <= few:
                wanted = 1 + min(due - 1, domain.behind)
                domain.behind -= wanted - 1
            if wanted:
                self._run(domain, seq, wanted)
        if not fast:
            begin = self.clock.now()
            self.counters.drafted_tokens += self.drafting.extend(domain, self._build, spare)
            self.drafting.seconds += self.clock.now() - begin
        else:
            self.drafting.skip(domain)

    def _run(self, domain: Domain, seq: Sequence, wanted: int) -> None:
        """Plan one run of up to `wanted` due tokens."""
        start, kv, account = seq.planned, domain.kv, seq.account
        assert account is not None
        end = self._chunk_end(kv, seq, start + wanted)
        end = self._chunk_end(kv, seq, self._make_room(domain, seq, end))
        if end <= start:
            return
        if kv.states:
            self._build.moves += kv.state_moves(account, start)
        if end > account.covered:
            grants = kv.reserve(account, end)
            if isinstance(grants, Verdict):
                raise InternalError(f"pages vanished while planning: {grants.reasons}")
            self._build.pages += grants
        tokens = tuple(seq.tokens[start:end])
        if len(tokens) < end - start:
            tokens += (PENDING,)
        samples = seq.samples and end == seq.known
        logits = int(samples)
        if seq.wants_rows and seq.rows_planned < seq.prompt_len and start < seq.prompt_len:
            logits = max(logits, end - max(start, seq.rows_planned))
            seq.rows_planned = max(seq.rows_planned, min(end, seq.prompt_len))
        run = TokenRun(seq.slot, start, tokens, logits, 0, samples)
        seq.planned = end
        seq.in_flight += 1
        seq.known += samples
        lists = self._build.short if end - start == 1 else self._build.chunks
        lists[domain.index].append((seq, run))

    def _chunk_end(self, kv: KVManager, seq: Sequence, end: int) -> int:
        """Cut a chunk at the last grid position in it, where states can be saved for later hits."""
        if not kv.aligns_chunks or end - seq.planned <= 1:
            return end
        last = min(end, seq.known - 1) // kv.grid * kv.grid
        return last if last > seq.planned else end

    def _make_room(self, domain: Domain, seq: Sequence, end: int) -> int:
        """The position up to which pages exist, after preempting from the end if none did.

        Pages that only drafts wanted come back first. A sequence whose result is awaited waits for
        it: pages may come back with it.
        """
        account, running = seq.account, domain.running
        assert account is not None
        if end <= account.covered:
            return end
        lean = not self.drafting.active
        while (fit := domain.kv.fit(account, end)) <= seq.planned:
            if not lean:
                lean = True
                if self.drafting.reclaim(domain):
                    return domain.kv.fit(account, end)
                continue
            if running[-1] is seq or seq.in_flight:
                return fit
            self._preempt(domain, running.pop())
        return fit

    def _preempt(self, domain: Domain, seq: Sequence) -> None:
        self.counters.preemptions += 1
        seq.preempted += 1
        self._leave(domain, seq)
        seq.planned = 0
        domain.enqueue(seq)

    # -- results -----------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[RequestOutput]:
        """Take in the result of the oldest open plan: at most one output per request.

        Raises:
            InternalError: the result does not answer that plan run by run.
        """
        if not self._flights or self._flights[0].step != result.step:
            raise InternalError(f"result of step {result.step} was not awaited")
        flight = self._flights.popleft()
        self.drafting.note(flight, result)
        return self._receiver.take(flight, result)

    def ended(self, slot: int) -> bool:
        """Whether the request that has `slot` in the oldest open plan ended since it was made."""
        return any(run.slot == slot and seq.done for seq, run in self._flights[0].entries)

    def abandon(self, error: str) -> list[RequestOutput]:
        """The only open plan could not be computed for lack of memory; nothing of it counts.

        What runs is put back, and the plan's requests are tried again (`Trials`). The output of one
        that failed alone carries `error`.

        Raises:
            InternalError: not exactly one plan is open.
        """
        if len(self._flights) != 1:
            raise InternalError(f"{len(self._flights)} plans are open, one can be abandoned")
        self.counters.abandoned += 1
        return self.trials.failed(self._flights.popleft(), error)

    def put_back(self) -> None:
        """Preempt everything that runs."""
        for domain in self.domains:
            while domain.running:
                self._preempt(domain, domain.running.pop())

    # -- readings ----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return sum(len(domain.waiting) for domain in self.domains)

    @property
    def running(self) -> int:
        return sum(len(domain.running) for domain in self.domains)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a result is awaited."""
        return bool(self._sequences) or bool(self._flights)

    @property
    def awaiting(self) -> int:
        """Plans without a result."""
        return len(self._flights)

    def stats(self) -> Stats:
        now = self.clock.now()
        alarms = [domain.kv.watch.alarm(domain.kv) for domain in self.domains]
        return Stats(
            running=self.running,
            waiting=self.waiting,
            kv_used=max(domain.kv.usage() for domain in self.domains),
            decode_gaps_s=tuple(domain.gaps.longest(now) for domain in self.domains),
            cache_alarms=tuple(alarm for alarm in alarms if alarm),
            draft_alarm=self.draft_watch.alarm or self.drafting.alarm or self.repeat_watch.alarm,
            draft_depth=self.drafting.aimed,
            draft_gain=self.drafting.gain,
            counters=self.counters,
            running_adapters=self._adapters.in_use(
                seq for domain in self.domains for seq in domain.running
            ),
            waiting_adapters=self._adapters.in_use(
                seq for domain in self.domains for seq in domain.waiting
            ),
        )

    def audit(self) -> None:
        """Check every account; when idle also that nothing is held.

        Raises:
            InternalError: an invariant is broken.
        """
        for domain in self.domains:
            audit.check(domain.kv) if self.has_work else audit.check_idle(domain.kv)


def _too_large(total: int, verdict: Verdict) -> RequestError:
    reasons = "; ".join(reason.message for reason in verdict.reasons)
    return RequestError(
        f"the request may grow to {total} cached tokens, more than the cache holds: {reasons}.",
        "Lower max_tokens or shorten the prompt.",
        param="max_tokens",
        code="out_of_memory",
    )
