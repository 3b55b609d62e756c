"""Calls of the sampling kernels: one launch for greedy rows, two for others."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from metainfer.ops.common import wide
from metainfer.ops.sample import ref
from metainfer.ops.sample.inputs import NO_LOGPROBS, SampleInputs, SampleOutput
from metainfer.ops.sample.tiles import LANES, PART, WARPS
from metainfer.ops.sample.triton import best_kernel, draw_kernel


@cache
def _counters(device: torch.device, rows: int) -> Tensor:
    """Arrivals per row: zero before and after every launch."""
    return torch.zeros(rows, dtype=torch.int32, device=device)


def sample(logits: Tensor, inputs: SampleInputs) -> SampleOutput:
    """See `ref.sample`: logits [R, V] float32 or shorter. Captured in a graph, `inputs` is one set
    of tensors that later steps fill; edits of logits and reports are torch's own launches."""
    if logits.shape[0] == 0:
        return ref.sample(logits, inputs)
    scores = logits if inputs.plain else ref.processed(wide(logits), inputs)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    quiet = inputs.top_logprobs == NO_LOGPROBS
    # Like the reference: a bad row keeps its id where nothing but the argmax was asked.
    zero = not (inputs.greedy and inputs.plain and quiet)
    tokens, bad = _drawn(scores, inputs, zero)
    if not inputs.plain:
        bad |= ~torch.isfinite(wide(logits).amax(dim=-1))
        tokens.masked_fill_(bad, 0)
    if quiet:
        return SampleOutput(tokens=tokens, bad=bad)
    return ref.with_logprobs(wide(logits), tokens, bad, inputs.top_logprobs)


def _drawn(scores: Tensor, inputs: SampleInputs, zero: bool) -> tuple[Tensor, Tensor]:
    """(tokens [R] int64, bad [R] bool) of rows whose logits are edited already."""
    (rows, vocab), device = scores.shape, scores.device
    parts = triton.cdiv(vocab, PART)
    counters = _counters(device, triton.next_power_of_2(rows))
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    bad = torch.empty(rows, dtype=torch.bool, device=device)
    best = torch.empty(rows, dtype=torch.float32, device=device)
    found = torch.empty((rows, parts), dtype=torch.int64, device=device)
    best_kernel[(rows, parts)](
        scores, found, counters, best, tokens, bad, vocab, scores.stride(0), int(zero), PART,
        triton.next_power_of_2(parts), num_warps=WARPS,
    )  # fmt: skip
    if inputs.greedy:
        return tokens, bad
    heat, index = inputs.temperature, inputs.index
    numbers = torch.empty((rows, vocab), dtype=torch.int32, device=device)
    weights = torch.empty((rows, vocab), dtype=torch.float64, device=device)
    filters = (inputs.top_k, inputs.top_p, inputs.min_p)
    # A filter that no row uses is a flag: no kernel is compiled for it.
    held = [x if x is not None else y for x, y in zip(filters, (index, heat, heat), strict=True)]
    draw_kernel[(rows, parts)](
        scores, best, bad, heat, *held, inputs.seed, index, numbers, weights, counters, tokens,
        vocab, scores.stride(0), *(int(x is not None) for x in filters), PART, LANES,
        num_warps=WARPS,
    )  # fmt: skip
    return tokens, bad
