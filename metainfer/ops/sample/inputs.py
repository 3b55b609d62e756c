"""What sampling takes and gives: one row per sequence that draws a token in this step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInputs:
    """Parameters of R rows over a vocabulary of V ids; tensors live beside the logits.

    None means that no row uses the feature. Host values (`greedy`, `top_logprobs`) choose code
    paths without waiting for the device.

    * `greedy`: every row is an argmax; draw parameters are then not read.
    * `temperature` float32 [R], 0 = this row is greedy. `top_k` int64 [R], 0 = off. `top_p`,
      `min_p` float32 [R], 1 and 0 = off.
    * `seed`, `index` int64 [R]: the draw is a function of these two and the row's distribution.
    * `presence`, `frequency`, `repetition` float32 [R] (0, 0 and 1 = off), over `output_counts`
      int32 [R, V] (generated tokens) and, for repetition, also `prompt_seen` bool [R, V].
    * `bias_rows`, `bias_tokens` int64 [n], `bias_values` float32 [n]: added to single logits.
    * `ban_rows`, `ban_tokens` int64 [n]: ids that may not be drawn (end ids before `min_tokens`).
    * `allowed` bool [R, V]: a grammar's mask.
    * `top_logprobs`: `NO_LOGPROBS`, or how many alternatives to report (0 = the chosen only).
    """

    greedy: bool = False
    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    seed: Tensor | None = None
    index: Tensor | None = None
    presence: Tensor | None = None
    frequency: Tensor | None = None
    repetition: Tensor | None = None
    output_counts: Tensor | None = None
    prompt_seen: Tensor | None = None
    bias_rows: Tensor | None = None
    bias_tokens: Tensor | None = None
    bias_values: Tensor | None = None
    ban_rows: Tensor | None = None
    ban_tokens: Tensor | None = None
    allowed: Tensor | None = None
    top_logprobs: int = NO_LOGPROBS

    @property
    def plain(self) -> bool:
        """No logit is changed before the draw."""
        return all(
            field is None
            for field in (
                self.presence,
                self.frequency,
                self.repetition,
                self.bias_rows,
                self.ban_rows,
                self.allowed,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """`tokens` int64 [R]. `bad` bool [R]: the row holds NaN or +inf, or nothing may be drawn; its
    token is then meaningless and the request fails alone.

    With log-probabilities, of the model's own distribution (before temperature, penalties, bias
    and masks, as OpenAI reports them): `logprobs` float32 [R] of the drawn token, `ranks` int64
    [R] (1 = the most likely; equal ones rank by id), `top_tokens` int64 and `top_logprobs`
    float32 [R, n], in falling order.
    """

    tokens: Tensor
    bad: Tensor
    logprobs: Tensor | None = None
    ranks: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None


def count_tokens(rows: list[list[int]], vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """int32 [R, V]: how often each id occurs in each row; the source of the count tensors."""
    counts = torch.zeros(len(rows), vocab, dtype=torch.int32, device=device)
    flat = [row * vocab + token for row, tokens in enumerate(rows) for token in tokens]
    if flat:
        ids = torch.tensor(flat, dtype=torch.int64)
        if counts.is_cuda:
            ids = ids.pin_memory().to(device, non_blocking=True)
        counts.view(-1).scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    return counts
