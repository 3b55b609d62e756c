"""Draws behind a captured step: parameters in fixed tensors, and a graph for each form of draw.

A draw is a function of a row's logits and six numbers. Of steps whose rows ask for no more than
these, the host writes the numbers in one copy and replays one graph; what a row may ask for beside
them (penalties, bias, bans, masks, log-probabilities) has shapes and histories of its own, and is
launched op by op behind the step (`sampler.launch_draws` says why).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metainfer.core.request import SamplingParams
from metainfer.executor.transfer import staged
from metainfer.ops.sample.inputs import SampleInputs, SampleOutput

Wanted = tuple[SamplingParams, int]
"""A row's parameters, and how often its request has drawn before."""

CaptureDraw = Callable[[Callable[[], SampleOutput]], tuple[Any, SampleOutput]]


def narrows(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p may leave out a token."""
    return bool(params.top_k) or params.top_p != 1.0 or params.min_p != 0.0


@dataclass(slots=True)
class DrawBuffers:
    """What the host writes for R rows. `numbers` int64 holds all of it; the rest are views.

    `seed`, `index`, `top_k` int64 [R]; `temperature`, `top_p`, `min_p` float32 [R].
    """

    numbers: Tensor
    seed: Tensor
    index: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor

    @staticmethod
    def make(rows: int, device: torch.device) -> DrawBuffers:
        numbers = torch.zeros(3 * rows + -(-3 * rows // 2), dtype=torch.int64, device=device)
        seed, index, top_k = numbers[: 3 * rows].view(3, rows)
        floats = numbers[3 * rows :].view(torch.float32)[: 3 * rows].view(3, rows)
        return DrawBuffers(numbers, seed, index, top_k, *floats)

    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Write the first rows; those behind them take their likeliest token."""
        rows, count = len(self.seed), len(wanted)
        new = np.zeros(len(self.numbers), np.int64)
        ints = new[: 3 * rows].reshape(3, rows)
        floats = new[3 * rows :].view(np.float32)[: 3 * rows].reshape(3, rows)
        ints[:, :count] = [
            [params.seed or 0 for params, _ in wanted],
            [index for _, index in wanted],
            [params.top_k for params, _ in wanted],
        ]
        floats[1] = 1.0
        floats[:, :count] = [
            [params.temperature for params, _ in wanted],
            [params.top_p for params, _ in wanted],
            [params.min_p for params, _ in wanted],
        ]
        self.numbers.copy_(staged(new, self.numbers.device), non_blocking=True)

    def inputs(self, narrowed: bool) -> SampleInputs:
        return SampleInputs(
            temperature=self.temperature,
            top_k=self.top_k if narrowed else None,
            top_p=self.top_p if narrowed else None,
            min_p=self.min_p if narrowed else None,
            seed=self.seed,
            index=self.index,
        )


class CapturedDraws:
    """Draws from the logits [R, V] that a captured step leaves, in two forms: `narrows` or not."""

    def __init__(
        self,
        logits: Tensor,
        sample: Callable[[Tensor, SampleInputs], SampleOutput],
        capture: CaptureDraw,
    ) -> None:
        self._buffers = DrawBuffers.make(len(logits), logits.device)
        self._buffers.fill(())
        self._forms = {
            narrowed: capture(partial(sample, logits, self._buffers.inputs(narrowed)))
            for narrowed in (True, False)  # the one that needs more memory first
        }

    def __call__(self, wanted: Sequence[Wanted]) -> SampleOutput:
        """Draw for the first rows; in the graph's memory: copy it before the next replay."""
        self._buffers.fill(wanted)
        graph, out = self._forms[any(narrows(params) for params, _ in wanted)]
        graph.replay()
        return first_rows(out, len(wanted))


@dataclass(frozen=True, slots=True)
class StepDraws:
    """What a captured step has for its rows: the likeliest tokens, and `draw` for the others.
    `counts`: how the draws of such steps were launched."""

    best: SampleOutput
    draw: CapturedDraws
    counts: Counter[str]


def first_rows(out: SampleOutput, rows: int) -> SampleOutput:
    """Tokens and faults of the first `rows` rows."""
    return SampleOutput(tokens=out.tokens[:rows], bad=out.bad[:rows])
