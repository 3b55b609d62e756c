"""From logits to results: gather the rows' parameters, draw, and hand each run its tokens.

The maths of drawing is the op `sample`; this file only lines parameters up with rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metainfer.core.request import SamplingParams
from metainfer.core.step import RunResult, TokenLogprobs, TokenRun
from metainfer.executor.slots import SlotState, SlotTable
from metainfer.executor.transfer import to_device
from metainfer.kernels.table import PhaseOps
from metainfer.ops.sample.inputs import NO_LOGPROBS, SampleInputs, SampleOutput, count_tokens
from metainfer.ops.sample.ref import best

SCORED_ROWS = 128
"""Prompt rows scored at once: each holds a few float32 copies of the vocabulary while it is."""


@dataclass(slots=True)
class _Row:
    """One row of logits that draws a token."""

    state: SlotState
    index: int  # how many draws came before, over the request's life
    generated: int  # tokens generated before this one


def finish_runs(
    logits: Tensor, runs: Sequence[TokenRun], table: SlotTable, ops: PhaseOps
) -> list[RunResult]:
    """Draw for every sampling run and report prompt log-probabilities where asked.

    `logits` [R, V] holds the rows of all runs that need any, in order. Sampled tokens are appended
    to the slots' histories. Drafts are verified greedily against the same rows.
    """
    rows: list[_Row] = []
    picks: list[int] = []
    at = 0
    for run in runs:
        state = table.states[run.slot]
        if run.samples:
            first = at + run.logits - 1 - run.drafts
            for offset in range(1 + run.drafts):
                picks.append(first + offset)
                done = len(state.tokens) - state.prompt_len + offset
                rows.append(_Row(state, state.sampled + offset, done))
        at += run.logits
    drawn = logits
    if len(picks) != logits.shape[0]:
        drawn = logits[to_device(np.array(picks, np.int64), logits.device)]
    output = ops.sample(drawn, gather(rows, logits.device)) if rows else None
    prompt = _prompt_logprobs(logits, runs, table)
    tokens, bad = [], []
    if output is not None:
        output = _to_host(output)
        tokens, bad = output.tokens.tolist(), output.bad.tolist()
    results, row = [], 0
    for number, run in enumerate(runs):
        count = 1 + run.drafts if run.samples else 0
        span = slice(row, row + count)
        row += count
        state = table.states[run.slot]
        if any(bad[span]):
            error = "the model's logits hold NaN or infinity for this request"
            results.append(RunResult(run.slot, error=error))
            continue
        kept = _accepted(run, tokens[span])
        state.sampled += len(kept)
        state.tokens.extend(kept)
        reports = _reports(output, state.params, span.start, kept)
        results.append(
            RunResult(run.slot, tuple(kept), reports, prompt[number], max(len(kept) - 1, 0))
        )
    return results


def gather(rows: Sequence[_Row], device: torch.device) -> SampleInputs:
    """The rows' parameters as tensors; a feature that no row uses stays None."""
    params = [row.state.params for row in rows]

    def column(values: Sequence[float], dtype: type[np.generic] = np.float32) -> Tensor:
        return to_device(np.array(values, dtype), device)

    def feature(name: str, off: float, dtype: type[np.generic] = np.float32) -> Tensor | None:
        values = [getattr(p, name) for p in params]
        return None if all(value == off for value in values) else column(values, dtype)

    wanted = [p.logprobs for p in params if p.logprobs is not None]
    common: dict[str, Any] = {
        "presence": feature("presence_penalty", 0.0),
        "frequency": feature("frequency_penalty", 0.0),
        "repetition": feature("repetition_penalty", 1.0),
        "top_logprobs": max(wanted) if wanted else NO_LOGPROBS,
        **_edits(rows, device),
    }
    if any(common[name] is not None for name in ("presence", "frequency", "repetition")):
        common.update(_histories(rows, device))
    if all(p.greedy for p in params):
        return SampleInputs(greedy=True, **common)
    return SampleInputs(
        temperature=column([p.temperature for p in params]),
        top_k=feature("top_k", 0, np.int64),
        top_p=feature("top_p", 1.0),
        min_p=feature("min_p", 0.0),
        seed=column([p.seed or 0 for p in params], np.int64),
        index=column([row.index for row in rows], np.int64),
        **common,
    )


def _edits(rows: Sequence[_Row], device: torch.device) -> dict[str, Tensor | None]:
    """Bias and bans as (row, token) lists."""
    bias = [(r, t, v) for r, row in enumerate(rows) for t, v in row.state.params.logit_bias.items()]
    bans = [
        (r, token)
        for r, row in enumerate(rows)
        if row.generated < row.state.params.min_tokens
        for token in (*row.state.eos_token_ids, *row.state.params.stop_token_ids)
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


def _histories(rows: Sequence[_Row], device: torch.device) -> dict[str, Tensor]:
    vocab = rows[0].state.vocab
    generated = [row.state.tokens[row.state.prompt_len :] for row in rows]
    prompts = [row.state.tokens[: row.state.prompt_len] for row in rows]
    return {
        "output_counts": count_tokens(generated, vocab, device),
        "prompt_seen": count_tokens(prompts, vocab, device) > 0,
    }


def _to_host(output: SampleOutput) -> SampleOutput:
    """`output` on the host. Tokens and faults, all that most steps have, travel together."""
    if output.tokens.device.type == "cpu":
        return output
    tokens, bad = torch.stack((output.tokens, output.bad.long())).cpu()
    rest = {
        field.name: value.cpu()
        for field in dataclasses.fields(output)
        if field.name not in ("tokens", "bad")
        and (value := getattr(output, field.name)) is not None
    }
    return SampleOutput(tokens=tokens, bad=bad.bool(), **rest)


def _accepted(run: TokenRun, tokens: list[int]) -> list[int]:
    """The drafts that the target drew itself, and the token after them."""
    if not run.drafts:
        return tokens
    proposed = run.tokens[-run.drafts :]
    kept = 0
    while kept < run.drafts and tokens[kept] == proposed[kept]:
        kept += 1
    return tokens[: kept + 1]


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
    logits: Tensor, runs: Sequence[TokenRun], table: SlotTable
) -> list[tuple[TokenLogprobs, ...]]:
    """For runs that report the prompt: row of position p scores the prompt token at p + 1."""
    found: list[tuple[TokenLogprobs, ...]] = []
    at = 0
    for run in runs:
        state = table.states[run.slot]
        wanted = state.params.prompt_logprobs
        first = run.end - run.logits
        targets = state.tokens[first + 1 : min(run.end + 1, state.prompt_len)]
        if wanted is None or not targets:
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
