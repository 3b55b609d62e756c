"""The two ends of a decoder, whose vocabulary ranks share: words in, logits out.

A rank holds `rows` of both matrices, from `rank * rows` on. A word that another rank holds counts
as zero here, and the sum over ranks is the word; logits of all ranks stand side by side. Ranks that
share the rows of a chunk look up each other's words.
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
    """`embed`, `head` [V / ranks, D], of the last rank filled up with zeros where `vocab` does not
    divide; `peers`: the ranks that share them. `apart`: every rank asks for words of its own."""

    embed: PackedWeight
    head: PackedWeight
    vocab: int
    peers: Peers = ALONE
    apart: bool = False

    def words(self, ids: Tensor, ops: PhaseOps) -> Tensor:
        """Embeddings [T, D] of ids [T] int64."""
        if self.peers.size == 1:
            alone: Tensor = ops.embed(ids, self.embed)
            return alone
        rows = self.embed.shape[0]
        ids = self.peers.rows(ids) if self.apart else ids
        local = ids - self.peers.rank * rows
        held = (local >= 0) & (local < rows)
        part: Tensor = ops.embed(local.where(held, 0), self.embed)
        part = part.where(held.unsqueeze(1), 0)
        return self.peers.sum_rows(part) if self.apart else self.peers.sum(part)

    def logits(self, rows: Tensor, linear: Callable[..., Tensor]) -> Tensor:
        """Logits [R, V] of hidden rows [R, D]; `linear`: the op that multiplies by the head."""
        found = self.peers.columns(linear(rows, self.head))
        return found if found.shape[1] == self.vocab else found[:, : self.vocab].contiguous()
