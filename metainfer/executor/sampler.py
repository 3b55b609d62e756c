"""From logits to results: gather the rows' parameters, draw, and hand each run its tokens.

The maths of drawing is the op `sample`; this file only lines parameters up with rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metainfer.core.request import SamplingParams
from metainfer.core.step import NON_FINITE, RunResult, TokenLogprobs, TokenRun
from metainfer.executor.drawing import StepDraws, narrows
from metainfer.executor.slots import SlotState, SlotTable
from metainfer.executor.speculative import accepted, drafts_of
from metainfer.executor.transfer import to_device, to_host, wait_for
from metainfer.kernels.table import PhaseOps
from metainfer.ops.sample.inputs import NO_LOGPROBS, SampleInputs, SampleOutput, count_tokens
from metainfer.ops.sample.ref import best

_FAULT = 1 << 32

LIKELIEST, CAPTURED = "likeliest", "captured"
"""How rows behind a captured step are drawn: as part of it · by a graph of their own. Else op by
op, and why: a name of `_Row.apart`, or `UNEVEN`, some rows that have logits do not draw."""
UNEVEN = "uneven"

SCORED_ROWS = 128
"""Prompt rows scored at once: each holds a few float32 copies of the vocabulary while it is."""


@dataclass(slots=True)
class _Row:
    """One row of logits that draws a token, behind `ahead`: the drafts of its run before it.

    The row counts only if all of these are accepted, so it draws as if they had been: they are part
    of its history, its number of draws and its number of generated tokens. `index`: draws before
    this one, over the request's life; `generated`: tokens generated before it. Both count draws
    that are under way when the row is made.
    """

    state: SlotState
    ahead: tuple[int, ...]
    index: int = field(init=False)
    generated: int = field(init=False)

    def __post_init__(self) -> None:
        state, before = self.state, self.state.awaited + len(self.ahead)
        self.index = state.sampled + before
        self.generated = len(state.tokens) - state.prompt_len + before

    @property
    def likeliest(self) -> bool:
        """Whether the draw is the likeliest token, and no more is to be said of it."""
        params = self.state.params
        return self.state.bare and params.greedy and self.generated >= params.min_tokens

    @property
    def apart(self) -> str:
        """What the draw asks for that a captured draw does not know; empty where it is nothing."""
        params, state = self.state.params, self.state
        asked = {
            "min_tokens": self.generated < params.min_tokens,
            "mask": state.grammar is not None or bool(params.allowed_token_ids),
            "history": params.counts_tokens,
            "bias": bool(params.logit_bias),
            "logprobs": params.logprobs is not None,
        }
        return next((name for name, wanted in asked.items() if wanted), "")


@dataclass(slots=True)
class Draws:
    """Draws under way for a segment's runs; `settle` reads them. Runs and the states of their slots
    stay as they were at the launch, whoever holds the slots by then.

    `output`: the draws of `rows`, on their way to the host; `drawn`: their tokens on the device,
    int64 [rows]. Both None where no run samples. `proposed`: the drafts of each run, `prompt`: its
    log-probabilities of prompt tokens.
    """

    runs: Sequence[TokenRun]
    states: list[SlotState]
    rows: list[_Row]
    proposed: list[tuple[int, ...]]
    prompt: list[tuple[TokenLogprobs, ...]]
    output: _Arriving | None
    drawn: Tensor | None

    def settle(self, *, guard: bool = True) -> list[RunResult]:
        """Hand each run its tokens, and append them to its history as far as drafts were accepted.

        A broken row is a fault only if its draw counts: behind a rejected draft it may hold
        anything. `guard` False lets it pass.
        """
        output = None if self.output is None else self.output.here()
        tokens = [] if output is None else output.tokens.tolist()
        bad = [] if output is None else output.bad.tolist()
        results, row = [], 0
        for number, run in enumerate(self.runs):
            count = 1 + run.drafts if run.samples else 0
            span = slice(row, row + count)
            row += count
            state, prompt = self.states[number], self.prompt[number]
            state.awaited -= run.samples
            if state.bare and run.samples and not (run.drafts or prompt or bad[span.start]):
                state.sampled += 1
                state.tokens.append(tokens[span.start])
                results.append(RunResult(run.slot, (tokens[span.start],)))
                continue
            kept = tokens[span]
            kept = kept[: accepted(self.proposed[number], kept) + 1]
            if state.grammar is not None and state.grammar.fault:
                error = f"its grammar cannot be followed any more: {state.grammar.fault}"
                results.append(RunResult(run.slot, error=error))
                continue
            flagged = any(bad[span.start : span.start + len(kept)])
            if flagged and _nothing_allowed(self.rows[span][: len(kept)]):
                whose = (
                    "its grammar leaves" if state.grammar is not None else "its own bounds leave"
                )
                results.append(RunResult(run.slot, error=f"{whose} no token"))
                continue
            if guard and (flagged or any(math.isnan(entry.logprob) for entry in prompt)):
                results.append(broken(run.slot))
                continue
            if state.grammar is not None and kept:
                state.grammar.accept(kept)
            state.sampled += len(kept)
            state.tokens.extend(kept)
            reports = _reports(output, state.params, span.start, kept)
            results.append(RunResult(run.slot, tuple(kept), reports, prompt, max(len(kept) - 1, 0)))
        return results


def launch_draws(
    logits: Tensor,
    runs: Sequence[TokenRun],
    table: SlotTable,
    ops: PhaseOps,
    *,
    step: StepDraws | None = None,
) -> Draws:
    """Draw for every sampling run, and score prompt tokens where asked.

    `logits` [R, V] holds the rows of all runs that need any, in order. `step`: what the captured
    step that left them has for their draws.
    """
    states = [table.states[run.slot] for run in runs]
    proposed = [drafts_of(run, state) for run, state in zip(runs, states, strict=True)]
    rows: list[_Row] = []
    picks: list[int] = []
    at = 0
    for run, state, drafts in zip(runs, states, proposed, strict=True):
        if run.samples:
            first = at + run.logits - 1 - run.drafts
            picks += range(first, first + 1 + run.drafts)
            rows += [_Row(state, drafts[:offset]) for offset in range(1 + run.drafts)]
            state.awaited += 1
        at += run.logits
    drawn = logits
    if len(picks) != logits.shape[0]:
        drawn = logits[to_device(np.array(picks, np.int64), logits.device)]
    prompt = _prompt_logprobs(logits, runs, states)
    if not rows:
        return Draws(runs, states, rows, proposed, prompt, None, None)
    output = None if step is None else _of_step(step, rows)
    if output is None:
        output = ops.sample(drawn, gather(rows, logits.device))
    return Draws(runs, states, rows, proposed, prompt, _Arriving.of(output), output.tokens)


def _of_step(step: StepDraws, rows: Sequence[_Row]) -> SampleOutput | None:
    """The draws of all rows as a captured step has them; None where one asks for more."""
    if len(step.best.tokens) != len(rows):
        how = UNEVEN
    elif all(row.likeliest for row in rows):
        how = LIKELIEST
    else:
        plain = (row.state.bare and row.generated >= row.state.params.min_tokens for row in rows)
        how = CAPTURED if all(plain) else next(filter(None, (row.apart for row in rows)))
    step.counts[how] += 1
    if how == LIKELIEST:
        return step.best
    return step.draw([(row.state.params, row.index) for row in rows]) if how == CAPTURED else None


def finish_runs(
    logits: Tensor, runs: Sequence[TokenRun], table: SlotTable, ops: PhaseOps, *, guard: bool = True
) -> list[RunResult]:
    """`launch_draws`, read at once."""
    draws = launch_draws(logits, runs, table, ops)
    wait_for(logits.device)
    return draws.settle(guard=guard)


def broken(slot: int) -> RunResult:
    """The result of a run that met NaN or infinity."""
    error = "the model's numbers hold NaN or infinity for this request"
    return RunResult(slot, error=error, code=NON_FINITE)


def _nothing_allowed(rows: Sequence[_Row]) -> bool:
    """Whether the request itself, not the model, leaves one of these rows nothing to draw."""
    for row in rows:
        mask = _mask(row)
        left = np.ones(row.state.vocab, np.bool_) if mask is None else mask.copy()
        left[_forbidden(row, mask)] = False
        if not left.any():
            return True
    return False


def fail_silent(finite: Sequence[bool], runs: Sequence[TokenRun], results: list[RunResult]) -> None:
    """Fail runs with rows that have no logits to show NaN, as all of a prompt but its end have.

    `finite`: of each row of the runs, in order.
    """
    at = 0
    for number, run in enumerate(runs):
        end = at + len(run.tokens)
        if not results[number].error and not all(finite[at : end - run.drafts]):
            results[number] = broken(run.slot)
        at = end


def gather(rows: Sequence[_Row], device: torch.device) -> SampleInputs:
    """The rows' parameters as tensors; a feature that no row uses stays None. What narrows comes
    whole or not at all: kernels are compiled for these two forms, and captured (`drawing`)."""
    params = [row.state.params for row in rows]

    def column(values: Sequence[float], dtype: type[np.generic] = np.float32) -> Tensor:
        return to_device(np.array(values, dtype), device)

    def feature(name: str, off: float, dtype: type[np.generic] = np.float32) -> Tensor | None:
        values = [getattr(p, name) for p in params]
        return None if all(value == off for value in values) else column(values, dtype)

    masks = _masks(rows)
    wanted = [p.logprobs for p in params if p.logprobs is not None]
    common: dict[str, Any] = {
        "presence": feature("presence_penalty", 0.0),
        "frequency": feature("frequency_penalty", 0.0),
        "repetition": feature("repetition_penalty", 1.0),
        "top_logprobs": max(wanted) if wanted else NO_LOGPROBS,
        "allowed": None if masks is None else to_device(masks, device),
        **_edits(rows, masks, device),
    }
    if any(common[name] is not None for name in ("presence", "frequency", "repetition")):
        common.update(_histories(rows, device))
    if all(p.greedy for p in params):
        return SampleInputs(greedy=True, **common)
    narrowed = any(narrows(p) for p in params)
    return SampleInputs(
        temperature=column([p.temperature for p in params]),
        top_k=column([p.top_k for p in params], np.int64) if narrowed else None,
        top_p=column([p.top_p for p in params]) if narrowed else None,
        min_p=column([p.min_p for p in params]) if narrowed else None,
        seed=column([p.seed or 0 for p in params], np.int64),
        index=column([row.index for row in rows], np.int64),
        **common,
    )


def _edits(
    rows: Sequence[_Row], masks: npt.NDArray[np.bool_] | None, device: torch.device
) -> dict[str, Tensor | None]:
    """Bias and bans as (row, token) lists. An end that is all a grammar leaves is not banned."""
    bias = [(r, t, v) for r, row in enumerate(rows) for t, v in row.state.params.logit_bias.items()]
    bans = [
        (r, token)
        for r, row in enumerate(rows)
        for token in _forbidden(row, None if masks is None else masks[r])
    ]

    def column(values: Sequence[float], dtype: type[np.generic] = np.int64) -> Tensor | None:
        return to_device(np.array(values, dtype), device) if values else None

    return {
        "bias_rows": column([b[0] for b in bias]),
        "bias_tokens": column([b[1] for b in bias]),
        "bias_values": column([b[2] for b in bias], np.float32),
        "ban_rows": column([b[0] for b in bans]),
        "ban_tokens": column([b[1] for b in bans]),
    }


def _forbidden(row: _Row, mask: npt.NDArray[np.bool_] | None) -> list[int]:
    """Ids that a row may not draw now: ends below `min_tokens`, what would complete a bad word."""
    params = row.state.params
    early = row.generated < params.min_tokens
    found = list(_ends(row, mask)) if early else []
    if params.bad_words:
        said = [*row.state.tokens[row.state.prompt_len :], *row.ahead]
        for *head, last in params.bad_words:
            if said[len(said) - len(head) :] == head:
                found.append(last)
    return found


def _ends(row: _Row, mask: npt.NDArray[np.bool_] | None) -> tuple[int, ...]:
    """The ends and stops, which a row below `min_tokens` may not draw."""
    ends = (*row.state.eos_token_ids, *row.state.params.stop_token_ids)
    if mask is not None and row.state.grammar is not None:
        rest = mask.copy()
        rest[list(ends)] = False
        if not rest.any():
            return ()
    return ends


def _histories(rows: Sequence[_Row], device: torch.device) -> dict[str, Tensor]:
    """What each row's penalties count. A request's tokens are counted once for all rows of its run,
    the drafts ahead of each row on top."""
    vocab = rows[0].state.vocab
    states = {id(row.state): row.state for row in rows}
    place = {key: number for number, key in enumerate(states)}
    generated = [state.tokens[state.prompt_len :] for state in states.values()]
    prompts = [state.tokens[: state.prompt_len] for state in states.values()]
    counts = count_tokens(generated, vocab, device)
    seen = count_tokens(prompts, vocab, device) > 0
    if len(states) != len(rows):
        owners = to_device(np.array([place[id(row.state)] for row in rows], np.int64), device)
        counts = counts[owners] + count_tokens([list(row.ahead) for row in rows], vocab, device)
        seen = seen[owners]
    return {"output_counts": counts, "prompt_seen": seen}


def _masks(rows: Sequence[_Row]) -> npt.NDArray[np.bool_] | None:
    """bool [R, V], what grammars and requests allow, every id for a row without either; None where
    no row has one."""
    own = [_mask(row) for row in rows]
    if all(mask is None for mask in own):
        return None
    masks = np.ones((len(rows), rows[0].state.vocab), np.bool_)
    for row, mask in zip(masks, own, strict=True):
        if mask is not None:
            row[:] = mask
    return masks


def _mask(row: _Row) -> npt.NDArray[np.bool_] | None:
    """bool [V], what the row's grammar and its `allowed_token_ids` both allow; None for any id."""
    state = row.state
    mask = None if state.grammar is None else state.grammar.allowed(row.ahead)
    if state.params.allowed_token_ids:
        wanted = np.zeros(state.vocab, np.bool_)
        wanted[list(state.params.allowed_token_ids)] = True
        mask = wanted if mask is None else mask & wanted
    return mask


@dataclass(slots=True)
class _Arriving:
    """Draws on their way to the host: `here` once the device has got there. Tokens and faults, all
    that most steps have, travel as one number each: a fault above the 32 bits of its token."""

    packed: Tensor
    rest: dict[str, Tensor]

    @staticmethod
    def of(output: SampleOutput) -> _Arriving:
        packed = torch.add(output.tokens, output.bad, alpha=_FAULT)
        rest = {
            each.name: to_host(value)
            for each in dataclasses.fields(output)
            if each.name not in ("tokens", "bad")
            and (value := getattr(output, each.name)) is not None
        }
        return _Arriving(to_host(packed), rest)

    def here(self) -> SampleOutput:
        """On the host; waits for nothing."""
        return SampleOutput(tokens=self.packed % _FAULT, bad=self.packed >= _FAULT, **self.rest)


def _reports(
    output: SampleOutput | None, params: SamplingParams, first: int, tokens: Sequence[int]
) -> tuple[TokenLogprobs, ...]:
    if output is None or params.logprobs is None or output.logprobs is None:
        return ()
    assert output.top_tokens is not None and output.top_logprobs is not None
    assert output.ranks is not None
    found = []
    for row, token in enumerate(tokens, start=first):
        ids = output.top_tokens[row, : params.logprobs].tolist()
        values = output.top_logprobs[row, : params.logprobs].tolist()
        top = tuple(zip(ids, values, strict=True))
        found.append(TokenLogprobs(token, float(output.logprobs[row]), top, int(output.ranks[row])))
    return tuple(found)


def _prompt_logprobs(
    logits: Tensor, runs: Sequence[TokenRun], states: Sequence[SlotState]
) -> list[tuple[TokenLogprobs, ...]]:
    """For runs that report the prompt: row of position p scores the prompt token at p + 1."""
    found: list[tuple[TokenLogprobs, ...]] = []
    at = 0
    for run, state in zip(runs, states, strict=True):
        wanted = state.params.prompt_logprobs
        first = run.end - run.logits
        if wanted is None or not (
            targets := state.tokens[first + 1 : min(run.end + 1, state.prompt_len)]
        ):
            found.append(())
        else:
            scores: list[TokenLogprobs] = []
            for begin in range(0, len(targets), SCORED_ROWS):
                some = targets[begin : begin + SCORED_ROWS]
                low = at + begin
                scores += _scores(logits[low : low + len(some)], some, wanted)
            found.append(tuple(scores))
        at += run.logits
    return found


def _scores(rows: Tensor, targets: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    raw = rows if rows.dtype == torch.float64 else rows.float()
    norm = raw.logsumexp(dim=-1)
    wanted = to_device(np.array(targets, np.int64), raw.device).unsqueeze(1)
    chosen = raw.gather(1, wanted).squeeze(1)
    ranks = ((raw > chosen.unsqueeze(1)).sum(dim=-1) + 1).tolist()
    ids, values = best(raw, count)
    tops = (values - norm.unsqueeze(1)).tolist()
    return tuple(
        TokenLogprobs(token, logprob, tuple(zip(top_ids, top, strict=True)), rank)
        for token, logprob, top_ids, top, rank in zip(
            targets, (chosen - norm).tolist(), ids.tolist(), tops, ranks, strict=True
        )
    )
