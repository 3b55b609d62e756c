"""A cache dealt over ranks, as a decode step meets it.

Every rank of a group holds each N-th entry of every page, and all of them need attention over the
whole: queries of all ranks' heads pass by each part, and what comes of it is merged exactly by the
logarithms of the parts' sums (`ops.dealt`). Chunks of prompts do not come here: they gather the
parts into a copy (`models.common.spread`).
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from metainfer.comm.peers import ALONE, Peers


class Dealt:
    """One rank's company. `moved`: bytes that this rank received, by what they were: ``queries``,
    ``logs``, ``outputs``, ``chosen``."""

    def __init__(self, peers: Peers = ALONE) -> None:
        self._peers = peers
        self.rank, self.size = peers.rank, peers.size
        self.moved: Counter[str] = Counter()

    def held(self, visible: Tensor) -> Tensor:
        """Of the first `visible` [T] entries of a sequence, how many this rank holds [T] int64."""
        return (visible - self.rank + self.size - 1) // self.size

    def heads(self, q: Tensor) -> Tensor:
        """Every rank's queries [T, h, D], head by head in rank order: [T, N h, D]."""
        self._count("queries", q)
        tokens, heads, width = q.shape
        return self._peers.columns(q.reshape(tokens, -1)).view(tokens, self.size * heads, width)

    def logs(self, logs: Tensor) -> Tensor:
        """Every rank's logarithms [T, K]: [N, T, K]."""
        self._count("logs", logs)
        return self._peers.rows(logs).view(self.size, *logs.shape)

    def choices(self, found: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Every rank's choices [T, k] int32 and their scores [T, k]: [N, T, k] each.

        Numbers travel beside their scores in one message. Floats hold them exactly below 2^24.
        """
        both = torch.stack((found.to(values.dtype), values))
        self._count("chosen", both)
        every = self._peers.rows(both).view(self.size, *both.shape)
        return every[:, 0].int(), every[:, 1]

    def merged(self, parts: Tensor) -> Tensor:
        """The sum over ranks of block `rank` of their `parts` [N, T, h, D]: [T, h, D]."""
        self._count("outputs", parts[0])
        return self._peers.sum_rows(parts.flatten(0, 1))

    def _count(self, what: str, part: Tensor) -> None:
        """`part` came from each of the other ranks."""
        self.moved[what] += (self.size - 1) * part.nbytes
