"""Tokens of several domains on their way to the experts that all of them share.

Each rank's rows go to all: as they are, or rounded as the experts' first product would round them
there, which halves the bytes and changes no bit. What is sent is under way when a call here
returns; the function that it returns waits for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from metainfer.comm.peers import Peers
from metainfer.ops.moe_experts.rounded import Rounded, Rows

Arriving = Callable[[], tuple[Rows, Tensor, Tensor]]
"""Waits for the rows, expert ids and routing weights of all domains."""


def send_rows(domains: Peers, x: Tensor, ids: Tensor, weights: Tensor) -> Arriving:
    """x [T, D], ids [T, k] int32 and weights [T, k] of this rank to all."""
    rows, numbers, shares = (domains.start_rows(part) for part in (x, ids, weights))
    return lambda: (rows.wait(), numbers.wait(), shares.wait())


def send_rounded(domains: Peers, x: Rounded, ids: Tensor, weights: Tensor) -> Arriving:
    """The same of rows that were rounded. Their scales, powers of two, travel with the weights."""
    rows = domains.start_rows(x.elements.view(torch.uint8))
    numbers = domains.start_rows(ids)
    shares = domains.start_rows(torch.cat((weights, x.scales.to(weights.dtype)), dim=1))

    def wait() -> tuple[Rows, Tensor, Tensor]:
        elements = rows.wait().view(x.elements.dtype)
        every, own, top = numbers.wait(), shares.wait(), weights.shape[1]
        scales = own[:, top:].to(x.scales.dtype).contiguous()
        return dataclasses.replace(x, elements=elements, scales=scales), every, own[:, :top]

    return wait
