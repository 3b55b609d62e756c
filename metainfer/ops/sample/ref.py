"""Draw one token per row. Order of processing, as in `transformers` and vLLM:

bias, bans, mask -> repetition, frequency, presence -> temperature -> top-k -> top-p -> min-p.

The draw inverts the cumulative distribution over ascending ids with one uniform number that
depends on (seed, index) alone. Ties: greedy takes the lower id; top-k and top-p keep the
lower ids first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from metainfer.ops.common import wide
from metainfer.ops.sample.draw import uniform
from metainfer.ops.sample.inputs import NO_LOGPROBS, SampleInputs, SampleOutput

_NEVER = float("-inf")


Kept = Callable[[Tensor, "Tensor | None", "Tensor | None"], Tensor]


def sample(logits: Tensor, inputs: SampleInputs, kept: Kept | None = None) -> SampleOutput:
    """logits [R, V] in any float dtype -> `SampleOutput`; see `SampleInputs`.

    `kept` finds the ids that top-k and top-p leave (`kept_by_sorting` by default).
    """
    if logits.shape[0] == 0:
        return _nothing(logits, inputs)
    if inputs.greedy and inputs.plain and inputs.top_logprobs == NO_LOGPROBS:
        best_value, token = logits.max(dim=-1)  # the first of equal maxima; NaN wins
        return SampleOutput(tokens=token, bad=~torch.isfinite(best_value))
    raw = wide(logits)
    bad = ~torch.isfinite(raw.amax(dim=-1))
    scores = raw if inputs.plain else processed(raw, inputs)
    best, tokens = scores.max(dim=-1)
    bad = bad | ~torch.isfinite(best)
    if not inputs.greedy:
        drawn = _draw(scores, inputs, kept or kept_by_sorting)
        assert inputs.temperature is not None
        tokens = torch.where(inputs.temperature > 0, drawn, tokens)
    tokens = tokens.masked_fill(bad, 0)
    if inputs.top_logprobs == NO_LOGPROBS:
        return SampleOutput(tokens=tokens, bad=bad)
    return with_logprobs(raw, tokens, bad, inputs.top_logprobs)


def processed(logits: Tensor, inputs: SampleInputs) -> Tensor:
    """Logits after bias, bans, mask and penalties: a new float tensor [R, V]."""
    scores = logits.clone()
    if inputs.bias_rows is not None:
        assert inputs.bias_tokens is not None and inputs.bias_values is not None
        where = (inputs.bias_rows, inputs.bias_tokens)
        scores.index_put_(where, inputs.bias_values.to(scores.dtype), accumulate=True)
    if inputs.ban_rows is not None:
        assert inputs.ban_tokens is not None
        never = torch.full((), _NEVER, dtype=scores.dtype, device=scores.device)
        scores.index_put_((inputs.ban_rows, inputs.ban_tokens), never)
    if inputs.allowed is not None:
        scores.masked_fill_(~inputs.allowed, _NEVER)
    return _penalised(scores, inputs)


def _penalised(scores: Tensor, inputs: SampleInputs) -> Tensor:
    counts = inputs.output_counts
    if inputs.repetition is not None:
        seen = torch.zeros_like(scores, dtype=torch.bool) if counts is None else counts > 0
        if inputs.prompt_seen is not None:
            seen = seen | inputs.prompt_seen
        by = inputs.repetition.to(scores.dtype).unsqueeze(1)
        scores = torch.where(seen, torch.where(scores > 0, scores / by, scores * by), scores)
    if counts is not None:
        if inputs.frequency is not None:
            scores = scores - inputs.frequency.to(scores.dtype).unsqueeze(1) * counts
        if inputs.presence is not None:
            scores = scores - inputs.presence.to(scores.dtype).unsqueeze(1) * (counts > 0)
    return scores


def tempered(scores: Tensor, temperature: Tensor) -> Tensor:
    """``(scores - max) / temperature``; greedy rows are divided by 1, they do not draw."""
    heat = torch.where(temperature > 0, temperature, 1.0).to(scores.dtype).unsqueeze(1)
    # Subtracting first keeps a tiny temperature from overflowing.
    return (scores - scores.amax(dim=-1, keepdim=True)) / heat


def _draw(scores: Tensor, inputs: SampleInputs, kept: Kept) -> Tensor:
    assert inputs.temperature is not None
    hot = tempered(scores, inputs.temperature)
    if inputs.top_k is not None or inputs.top_p is not None:
        hot = hot.masked_fill(~kept(hot, inputs.top_k, inputs.top_p), _NEVER)
    return invert(hot, inputs)


def kept_by_sorting(hot: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """bool [R, V]: exactly the `top_k` best, then the shortest prefix whose mass reaches `top_p`.

    The mass is of what top-k left; the best token always stays.
    """
    values, order = hot.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(hot.shape[1], device=hot.device).expand_as(hot)
    keep = torch.ones_like(hot, dtype=torch.bool)
    if top_k is not None:
        limit = torch.where(top_k > 0, top_k, hot.shape[1]).unsqueeze(1)
        keep = place < limit
        values = values.masked_fill(~keep, _NEVER)
    if top_p is not None:
        mass = torch.softmax(values.double(), dim=-1)
        before = mass.cumsum(dim=-1) - mass
        wanted = top_p.double().unsqueeze(1)
        keep = keep & ((before < wanted) | (wanted >= 1.0) | (place == 0))
    return torch.zeros_like(keep).scatter(1, order, keep)


def invert(hot: Tensor, inputs: SampleInputs) -> Tensor:
    """Draw by inverse cumulative distribution over ascending ids, in float64: int64 [R]."""
    assert inputs.seed is not None and inputs.index is not None
    weight = hot.double().exp()  # the best token weighs 1
    if inputs.min_p is not None:
        weight = weight.masked_fill(weight < inputs.min_p.double().unsqueeze(1), 0.0)
    total = weight.cumsum(dim=-1)
    point = uniform(inputs.seed, inputs.index).unsqueeze(1) * total[:, -1:]
    at = torch.searchsorted(total, point, right=True)
    # Rounding may put the point on the total itself: the last drawable id is then meant.
    last = (weight > 0).long().cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(at, last).squeeze(1)


def with_logprobs(raw: Tensor, tokens: Tensor, bad: Tensor, count: int) -> SampleOutput:
    chosen = raw.gather(1, tokens.unsqueeze(1))  # [R, 1]
    norm = raw.logsumexp(dim=-1, keepdim=True)
    ids = torch.arange(raw.shape[1], device=raw.device)
    ahead = (raw > chosen) | ((raw == chosen) & (ids < tokens.unsqueeze(1)))
    top_tokens, top_values = best(raw, min(count, raw.shape[1]))
    return SampleOutput(
        tokens=tokens,
        bad=bad,
        logprobs=(chosen - norm).squeeze(1).float(),
        ranks=ahead.sum(dim=-1) + 1,
        top_tokens=top_tokens,
        top_logprobs=(top_values - norm).float(),
    )


def best(raw: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest per row, in falling order, ties by lower id: ids and values [R, count].

    `topk` orders ties as it likes, so rows that have some go through `_best_by_argmax`, which costs
    a pass over the row for each id.
    """
    values, ids = raw.topk(min(count + 1, raw.shape[1]), dim=-1)
    tied = (values[:, 1:] == values[:, :-1]).any(dim=-1)
    ids, values = ids[:, :count], values[:, :count]
    if count and bool(tied.any()):
        rows = tied.nonzero().squeeze(1)
        ids[rows], values[rows] = _best_by_argmax(raw[rows], ids.shape[1])
    return ids, values


def _best_by_argmax(left: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `best`, for rows with ties; overwrites `left`."""
    ids, values = [], []
    for _ in range(count):
        value, index = left.max(dim=-1, keepdim=True)
        left.scatter_(1, index, _NEVER)
        ids.append(index)
        values.append(value)
    return torch.cat(ids, dim=1), torch.cat(values, dim=1)


def _nothing(logits: Tensor, inputs: SampleInputs) -> SampleOutput:
    """The answer for no rows at all."""
    tokens = torch.empty(0, dtype=torch.int64, device=logits.device)
    bad = torch.empty(0, dtype=torch.bool, device=logits.device)
    if inputs.top_logprobs == NO_LOGPROBS:
        return SampleOutput(tokens=tokens, bad=bad)
    width = inputs.top_logprobs
    floats = torch.empty(0, dtype=torch.float32, device=logits.device)
    return SampleOutput(
        tokens=tokens,
        bad=bad,
        logprobs=floats,
        ranks=tokens,
        top_tokens=tokens.new_empty(0, width),
        top_logprobs=floats.new_empty(0, width),
    )
