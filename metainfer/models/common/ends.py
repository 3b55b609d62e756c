"""The two ends of a decoder, whose vocabulary ranks share: words in, logits out.

A rank holds `rows` of both matrices, from `rank * rows` on. A word that another rank holds counts
as zero here, and the sum over ranks is the word; logits of all ranks stand side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from metainfer.comm.peers import ALONE, Peers
from metainfer.kernels.table import PhaseOps
from metainfer.ops.linear.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class Ends:
    """`embed`, `head` [V / ranks, D]; `peers`: the ranks that share them."""

    embed: PackedWeight
    head: PackedWeight
    peers: Peers = ALONE

    def words(self, ids: Tensor, ops: PhaseOps) -> Tensor:
        """Embeddings [T, D] of ids [T] int64."""
        if self.peers.size == 1:
            alone: Tensor = ops.embed(ids, self.embed)
            return alone
        rows = self.embed.shape[0]
        local = ids - self.peers.rank * rows
        held = (local >= 0) & (local < rows)
        part: Tensor = ops.embed(local.where(held, 0), self.embed)
        return self.peers.sum(part.where(held.unsqueeze(1), 0))

    def logits(self, rows: Tensor, linear: Callable[..., Tensor]) -> Tensor:
        """Logits [R, V] of hidden rows [R, D]; `linear`: the op that multiplies by the head."""
        return self.peers.columns(linear(rows, self.head))
