"""Results into outputs: accept tokens, decide stops, commit pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metainfer.core.errors import InternalError
from metainfer.core.request import FinishReason
from metainfer.core.step import NON_FINITE, RequestOutput, RunResult, StepResult, TokenRun

if TYPE_CHECKING:
    from metainfer.scheduler.build import Flight
    from metainfer.scheduler.scheduler import Scheduler
    from metainfer.scheduler.sequence import Sequence


class Receiver:
    """The scheduler's second half; holds no state of its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def take(self, flight: Flight, result: StepResult) -> list[RequestOutput]:
        """Outputs of one step, in the order of its runs."""
        if len(result.runs) != len(flight.entries):
            raise InternalError(f"{len(flight.entries)} runs planned, {len(result.runs)} answered")
        scheduler = self._scheduler
        domains, now = scheduler.domains, scheduler.clock.now()
        worst = [0.0] * len(domains)
        outputs: list[RequestOutput] = []
        ended = False
        for (seq, run), answer in zip(flight.entries, result.runs, strict=True):
            if answer.slot != run.slot:
                raise InternalError(f"run of slot {run.slot} was answered for slot {answer.slot}")
            seq.in_flight -= 1
            if seq.done:
                continue
            output = self._plain(seq, run, answer) or self._settle(seq, run, answer)
            if output is None:
                continue
            outputs.append(output)
            if answer.tokens:
                gap = now - seq.last_token_s
                if seq.last_token_s and gap > worst[seq.domain]:
                    worst[seq.domain] = gap
                seq.last_token_s = now
            ended = ended or seq.done
        for domain, gap in zip(domains, worst, strict=True):
            if gap:
                domain.gaps.note(now, gap)
            if ended:
                domain.sweep()
        return outputs

    def _plain(self, seq: Sequence, run: TokenRun, answer: RunResult) -> RequestOutput | None:
        """The common case, short of everything it does not need: one more token, no end."""
        tokens, start, account = answer.tokens, run.start, seq.account
        count = len(seq.tokens)
        if (
            len(tokens) != 1
            or run.drafts
            or seq.hold is not None
            or start + 1 != count
            or len(run.tokens) != 1
            or account is None
            or start < seq.prompt_len
            or count + 1 >= seq.limit
            or tokens[0] in seq.stops
            or answer.error
        ):
            return None
        seq.tokens.append(tokens[0])  # `known` counted it when it was planned
        account.length = count
        if count >= account.border:
            self._scheduler.domains[seq.domain].kv.commit(account, count)
        self._scheduler.counters.generated_tokens += 1
        index = count - seq.prompt_len
        return RequestOutput(
            seq.request_id, tokens, index, answer.logprobs, (), None, None, seq.cached_tokens
        )

    def _settle(self, seq: Sequence, run: TokenRun, answer: RunResult) -> RequestOutput | None:
        """Take in one run's answer; the output, if there is something to tell."""
        scheduler, domain = self._scheduler, self._scheduler.domains[seq.domain]
        start = run.start
        resident = seq.account is not None  # not preempted since: nobody re-enters in flight
        end = start + len(run.tokens)
        if answer.error:
            if seq.prefix is not None:
                domain.kv.discredit(seq.prefix, len(seq.tokens))
            scheduler.counters.non_finite += answer.code == NON_FINITE
            return self._end(seq, (), FinishReason.ERROR, answer)
        count_before = len(seq.tokens)
        if start < seq.prompt_len:
            scheduler.counters.prompt_tokens += min(end, seq.prompt_len) - start
        finish, stop = None, None
        kept = answer.tokens
        if run.samples:
            seq.known -= 1
            rejected = run.drafts - answer.accepted_drafts
            if len(kept) != answer.accepted_drafts + 1 or rejected < 0:
                raise InternalError(
                    f"slot {run.slot}: {len(kept)} tokens for {answer.accepted_drafts} drafts"
                )
            end -= rejected
            scheduler.counters.accepted_drafts += answer.accepted_drafts
            if run.drafts:
                scheduler.draft_watch.note(run.drafts, answer.accepted_drafts)
            kept, finish, stop = accept(seq, kept)
            scheduler.counters.generated_tokens += len(kept)
        if resident:
            self._commit_pages(seq, run, end)
        if seq.wants_rows and start < seq.prompt_len:
            seq.rows_done = max(seq.rows_done, min(start + len(run.tokens), seq.prompt_len))
        if not seq.samples and resident and end >= seq.stop_at:
            finish = FinishReason.LENGTH
        if finish is not None:
            return self._end(seq, kept, finish, answer, count_before, stop)
        if not kept and not answer.prompt_logprobs:
            return None
        return RequestOutput(
            seq.request_id,
            kept,
            count_before - seq.prompt_len,
            answer.logprobs,
            answer.prompt_logprobs,
            None,
            None,
            seq.cached_tokens,
            queue_s=seq.queue_s,
        )

    def _commit_pages(self, seq: Sequence, run: TokenRun, end: int) -> None:
        """Confirm what the run computed, undo what it computed in vain."""
        account = seq.account
        assert account is not None
        domain = self._scheduler.domains[seq.domain]
        if seq.hold is run:
            seq.hold = None
            rejected = run.start + len(run.tokens) - end
            end = domain.kv.rewind(account, end, rejected)
            seq.planned = end
        end = min(end, len(seq.tokens))
        if end > account.length:
            domain.kv.commit(account, end)
        if not seq.prompt_noted and end >= seq.prompt_len:
            seq.prompt_noted = True
            domain.kv.note_prompt(account.prefix, seq.prompt_len)

    def _end(
        self,
        seq: Sequence,
        kept: tuple[int, ...],
        finish: FinishReason,
        answer: RunResult,
        count_before: int = -1,
        stop: int | None = None,
    ) -> RequestOutput:
        scheduler = self._scheduler
        scheduler.retire(seq)
        scheduler.counters.finished += 1
        if scheduler.drafting.active:
            scheduler.repeat_watch.ended(seq.tokens[seq.prompt_len :])
        before = count_before if count_before >= 0 else len(seq.tokens)
        return RequestOutput(
            seq.request_id,
            kept,
            before - seq.prompt_len,
            answer.logprobs[: len(kept)],
            answer.prompt_logprobs,
            finish,
            stop,
            seq.cached_tokens,
            answer.error,
            seq.queue_s,
            answer.code,
        )


def accept(
    seq: Sequence, tokens: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
    """Append sampled tokens up to the first stop: those kept, why it ended, the id that ended it.

    A stop id counts only after `min_tokens` tokens, and is itself not kept.
    """
    for kept, token in enumerate(tokens):
        if token in seq.stops and len(seq.tokens) >= seq.min_total:
            return tokens[:kept], FinishReason.STOP, token
        seq.tokens.append(token)
        seq.known += 1
        if len(seq.tokens) >= seq.limit:
            return tokens[: kept + 1], FinishReason.LENGTH, None
    return tokens, None, None
