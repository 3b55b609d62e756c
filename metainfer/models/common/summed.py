"""A product of rows whose sum over ranks goes on: whole, or piece by piece of the rows, each
piece's sum under way while the next piece is computed.

Rows of a product do not touch each other, and a sum over ranks is one of elements, so pieces carry
the bits of the whole wherever the product's kernel gives a row the same bits beside fewer others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from metainfer.comm.peers import Peers
from metainfer.comm.side import Pending, Turns


@dataclass(frozen=True, slots=True)
class Pieces(Pending[Tensor]):
    """The sum `whole` [T, D], of which `begun` are the pieces."""

    whole: Tensor
    begun: Sequence[Pending[Tensor]]

    def wait(self) -> Tensor:
        for piece in self.begun:
            piece.wait()
        return self.whole


def start_summed(
    product: Callable[..., Tensor], rows: Sequence[Tensor], peers: Peers, turns: Turns
) -> Pending[Tensor]:
    """The sum over `peers` of ``product(*rows)`` [T, D], in `turns.pieces` pieces.

    `rows`: tensors [T, ...], T above 0. Of several pieces all but the last have equally many rows.
    """
    if turns.pieces == 1 or peers.size == 1:
        return peers.start_sum(product(*rows))
    whole, begun, count = None, [], rows[0].shape[0]
    step = -(-count // turns.pieces)
    for first in range(0, count, step):
        part = slice(first, first + step)
        piece = product(*(each[part] for each in rows))
        if whole is None:
            whole = piece.new_empty(count, *piece.shape[1:])
        begun.append(peers.start_sum(whole[part].copy_(piece)))
    assert whole is not None
    return Pieces(whole, begun)
