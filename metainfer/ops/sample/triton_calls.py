"""Calls of the sampling kernels: two launches for greedy rows, three for draws, five where a row
may have top-k or top-p."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from metainfer.ops.common import wide
from metainfer.ops.sample import ref
from metainfer.ops.sample.inputs import NO_LOGPROBS, SampleInputs, SampleOutput
from metainfer.ops.sample.tiles import BINS, BLOCK, TILE, Tile
from metainfer.ops.sample.triton import best_kernel, draw_kernel, pick_kernel, weigh_kernel
from metainfer.ops.sample.triton_kept import choose_kernel, gather_kernel


def sample(logits: Tensor, inputs: SampleInputs, *, tile: Tile = TILE) -> SampleOutput:
    """See `ref.sample`: logits [R, V] float32 or shorter. Captured in a graph, `inputs` is one set
    of tensors that later steps fill; edits of logits and reports are torch's own launches."""
    if logits.shape[0] == 0:
        return ref.sample(logits, inputs)
    scores = logits if inputs.plain else ref.processed(wide(logits), inputs)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    quiet = inputs.top_logprobs == NO_LOGPROBS
    # Like the reference: a bad row keeps its id where nothing but the argmax was asked.
    zero = not (inputs.greedy and inputs.plain and quiet)
    tokens, bad = _drawn(scores, inputs, zero, tile)
    if not inputs.plain:
        bad |= ~torch.isfinite(wide(logits).amax(dim=-1))
        tokens.masked_fill_(bad, 0)
    if quiet:
        return SampleOutput(tokens=tokens, bad=bad)
    return ref.with_logprobs(wide(logits), tokens, bad, inputs.top_logprobs)


def _drawn(scores: Tensor, inputs: SampleInputs, zero: bool, tile: Tile) -> tuple[Tensor, Tensor]:
    """(tokens [R] int64, bad [R] bool) of rows whose logits are edited already."""
    (rows, vocab), stride, device = scores.shape, scores.stride(0), scores.device
    parts = triton.cdiv(vocab, tile.part)
    lanes = triton.next_power_of_2(parts)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    bad = torch.empty(rows, dtype=torch.bool, device=device)
    keys = torch.empty((rows, parts), dtype=torch.int64, device=device)
    best_kernel[(rows, parts)](scores, keys, vocab, stride, tile.part, num_warps=tile.warps)
    if inputs.greedy:
        pick_kernel[(rows,)](keys, tokens, bad, vocab, parts, int(zero), lanes, num_warps=1)
        return tokens, bad
    heat, index = inputs.temperature, inputs.index
    best = torch.empty(rows, dtype=torch.float32, device=device)
    sums = torch.empty((rows, parts), dtype=torch.float64, device=device)
    limits = torch.empty(rows, dtype=torch.int32, device=device)
    narrowed = inputs.top_k is not None or inputs.top_p is not None
    room = rows if narrowed else 0
    counts = torch.empty((room, parts, BINS), dtype=torch.int32, device=device)
    offsets = torch.empty((room, parts + 1), dtype=torch.int32, device=device)
    # A filter that no row uses is a flag: no kernel is compiled for it.
    asked = (inputs.top_k, inputs.top_p, inputs.min_p)
    top_k, top_p, min_p = (
        x if x is not None else y for x, y in zip(asked, (index, heat, heat), strict=True)
    )
    flags = tuple(int(x is not None) for x in asked)
    weigh_kernel[(rows, parts)](
        scores, keys, heat, top_k, top_p, min_p, best, sums, counts, tokens, bad, vocab, stride,
        *flags, tile.part, lanes, BINS, num_warps=tile.warps,
    )  # fmt: skip
    draw_kernel[(rows,)](
        scores, best, heat, top_k, top_p, min_p, inputs.seed, index, sums, counts, offsets, limits,
        tokens, vocab, stride, parts, *flags, tile.part, lanes, BINS, BLOCK, num_warps=tile.warps,
    )  # fmt: skip
    if narrowed:
        numbers = torch.empty((rows, vocab), dtype=torch.int32, device=device)
        ids = torch.empty((rows, vocab), dtype=torch.int32, device=device)
        weights = torch.empty((rows, vocab), dtype=torch.float64, device=device)
        gather_kernel[(rows, parts)](
            scores, best, heat, offsets, limits, numbers, ids, vocab, stride, tile.part, BINS,
            num_warps=tile.warps,
        )  # fmt: skip
        choose_kernel[(rows,)](
            top_k, top_p, min_p, inputs.seed, index, sums, offsets, limits, numbers, ids, weights,
            tokens, vocab, parts, *flags, lanes, tile.lanes, num_warps=tile.row_warps,
        )  # fmt: skip
    return tokens, bad
